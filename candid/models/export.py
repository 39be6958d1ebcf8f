"""A saved model as one file for other programs: ONNX, or the archive of torch.export."""

import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from candid._support.errors import CandidError
from candid._support.files import replacing
from candid._support.randomness import generator
from candid._support.text import short_name
from candid._support.version import __version__
from candid.models import checkpoint
from candid.models.flow.mixture import log_standard_normal
from candid.models.protocol import as_latent

Format = Literal["onnx", "torch-export"]
Run = Callable[[Tensor], Sequence[Tensor]]
ENDINGS: dict[str, Format] = {".onnx": "onnx", ".pt2": "torch-export"}
OUTPUTS = {
    "logits": "(batch, classes): log posterior up to a constant of the image; softmax gives the posterior",
    "log_density": "(batch,): log p(x) of the 8-bit image in nats; bits/dim are -log p / (D ln 2)",
    "latent": "(batch, D): z, the constant cosine coefficients first",
    "novelty": "(batch, J): J scores that rise with outlyingness; held-out ones are in the JSON file",
}
PIXELS, FEATURES = ("logits", "log_density", "latent"), ("logits", "novelty")
"""The outputs of models with a density of pixels, and of features."""
IMAGES = (
    "float32 in [0, 1], (batch, channels, height, width), 8-bit pixels divided by 255, colours as RGB; the "
    "normalisation is part of the model"
)
TOLERANCE = 1e-4
"""Tolerance of the largest difference from PyTorch, as :func:`difference` measures it."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
METADATA = "candid.json"
"""The name of the metadata in a .pt2 archive."""
CHECKED = 4
"""Images on which both are compared if the batch size is dynamic."""


@dataclass(frozen=True)
class Exported:
    """A file that was written, after it was found to compute what the model does."""

    path: Path
    format: Format
    batch: int | None
    """Images in a batch; None for any number."""
    bytes: int
    differences: dict[str, float]
    """Largest difference from PyTorch by output; see :func:`difference`."""


class Inference(nn.Module):
    """Maps images to plain float32 tensors: ``logits``, and what a generative model has more."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.frozen()
        latent = as_latent(model)
        self.has_latent = latent is not None
        self.constant = 0.0 if latent is None else -latent.dimensions * latent.bits_offset * math.log(2)
        for part in self.model.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if name.startswith("inverse_"):  # the way back is not exported
                    setattr(part, name, buffer.new_empty(0))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.model.density_of == "features":
            return _of_features(self.model, images)
        if not self.has_latent:
            return (self.model(images),)
        z, log_det, logits = self.model(images)
        return logits, logits.logsumexp(1) + log_standard_normal(z) + log_det + self.constant, z


def export(
    model: Any,
    out: str | os.PathLike[str] = ".",
    formats: Sequence[Format] | None = None,
    batch: int | None = None,
) -> list[Exported]:
    """Write a model as files for other programs; each is run and compared with PyTorch before.

    Args:
        model: a model, its folder, the folder of a run, or a bundled name.
        out: a file, whose ending then says the format (.onnx, .pt2), or a folder.
        formats: of the files in a folder; None for ONNX.
        batch: the number of images that the network takes at a time; None for any.

    Returns:
        The files that were written. If one of them is wrong, none is written.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     export("cifar10-resnet", folder, formats=("torch-export",), batch=1)[0].path.name
    'cifar10-resnet.pt2'
    """
    name = model if isinstance(model, str | os.PathLike) else "model"
    targets = _targets(Path(name), Path(out), formats)
    if batch is not None and batch < 1:
        raise CandidError(f"--batch takes a number from 1 on, or 'dynamic', not {batch}.")
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing and "onnx" in targets.values():
        raise CandidError(
            f"ONNX files need {' and '.join(missing)}: install them with "
            "'pip install candid-vision[export]', or choose --format torch-export."
        )
    model = checkpoint.resolve(model)
    _check_eye(model)
    program = _program(model, batch)
    metadata = metadata_of(model)
    made = {
        file: _onnx(program, metadata) if form == "onnx" else _archive(program, metadata)
        for file, form in targets.items()
    }
    found = [
        Exported(file, form, batch, len(made[file]), _checked(model, made[file], form, batch))
        for file, form in targets.items()
    ]
    for file, content in made.items():
        _write(content, file)
    return found


def _targets(path: Path, out: Path, formats: Sequence[Format] | None) -> dict[Path, Format]:
    """Return the files to write and their formats."""
    ending = {form: suffix for suffix, form in ENDINGS.items()}
    if out.suffix not in ENDINGS or out.is_dir():
        if out.is_file():
            raise CandidError(f"'{out}' is a file: name a folder, or a file that ends in .onnx or .pt2.")
        return {out / f"{short_name(path)}{ending[form]}": form for form in formats or ("onnx",)}
    own = ENDINGS[out.suffix]
    if formats is not None and tuple(formats) != (own,):
        raise CandidError(
            f"'{out.name}' would be of the format {own}, not {' and '.join(formats)}: name a folder instead, "
            "or change the ending."
        )
    return {out: own}


def metadata_of(model: Any) -> dict[str, str]:
    """Return what a file says about itself: everything is text, lists and dictionaries are JSON."""
    beta = model.record.beta
    return {
        "candid_version": __version__,
        "kind": model.kind,
        "class_names": json.dumps(model.class_names),
        "image_shape": json.dumps(model.image_shape),
        "images": IMAGES,
        "outputs": json.dumps({name: OUTPUTS[name] for name in _outputs(model)}),
        **({} if beta is None else {"beta": str(beta)}),
    }


def _outputs(model: Any) -> list[str]:
    return list({"pixels": PIXELS, "features": FEATURES}.get(model.density_of, ("logits",)))


def _of_features(model: Any, images: Tensor) -> tuple[Tensor, ...]:
    found = model.outputs(images)
    return found.logits, found.novelty


def _check_eye(model: Any) -> None:
    eye = getattr(model, "eye", None)
    if eye is not None and not eye.differentiable:
        raise CandidError(
            f"The eye '{eye.name}' is an ONNX file already, and can't be joined with the head in one file: "
            "train the model with an eye in torch, such as lite0 or a .pt2 file."
        )


def _program(model: Any, batch: int | None) -> torch.export.ExportedProgram:
    """Return the network as a graph, for a fixed or any number of images."""
    sample = torch.zeros(2 if batch is None else batch, *model.image_shape)  # of one, torch takes no other
    shapes = {"images": {0: torch.export.Dim("batch", min=1, max=2**16)} if batch is None else None}
    if model.density_of == "features":
        model.outputs(sample[:1].requires_grad_())  # reads the weights in torch, which tracing can't
    try:
        with _quiet():
            strict = model.density_of != "features"  # what eyes do besides tensors can't be traced strictly
            return torch.export.export(Inference(model), (sample,), dynamic_shapes=shapes, strict=strict)
    except RuntimeError as error:
        raise _refused(error, batch) from error


def _onnx(program: torch.export.ExportedProgram, metadata: dict[str, str]) -> bytes:
    names = list(json.loads(metadata["outputs"]))
    try:
        with _quiet():
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=names
            )
            assert made is not None
            model = made.model_proto
        _name_the_batch(model.graph)
        for key, value in metadata.items():
            model.metadata_props.add(key=key, value=value)
        return model.SerializeToString()
    except RuntimeError as error:
        raise _refused(error, None) from error
    except ValueError as error:  # protobuf's limit
        raise CandidError(
            f"The model is too large for one ONNX file ({error}): choose --format torch-export."
        ) from error


def _name_the_batch(graph: Any) -> None:
    """Call the batch dimension ``batch``, not by the exporter's symbol."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if symbol and size.dim_param == symbol:
                size.dim_param = "batch"


def _archive(program: torch.export.ExportedProgram, metadata: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with _quiet():
        torch.export.save(program, content, extra_files={METADATA: json.dumps(metadata)})
    return content.getvalue()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporters say to their developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _refused(error: Exception, batch: int | None) -> CandidError:
    reason = str(error).strip().split("\n")[0]
    advice = "try --batch 1" if batch is None else "try another torch"
    return CandidError(f"torch {torch.__version__} can't export this network ({reason}): {advice}.")


@torch.inference_mode()
def _checked(model: Any, content: bytes, form: Format, batch: int | None) -> dict[str, float]:
    """Return the largest differences between what the file computes and what the model does."""
    run = _onnx_runner(content) if form == "onnx" else _archive_runner(content)
    images = check_images(model.image_shape, CHECKED if batch is None else batch)
    sizes = (1, len(images) - 1) if batch is None else (batch,)
    found = [torch.cat(parts) for parts in zip(*map(run, images.split(sizes)), strict=True)]
    expected = [torch.cat(parts) for parts in zip(*map(_expected(model), images.split(8)), strict=True)]
    differences = {
        name: max(map(difference, own.T, theirs.T)) if name == "novelty" else difference(own, theirs)
        for name, own, theirs in zip(_outputs(model), expected, found, strict=True)
    }
    for name, value in differences.items():
        if not value <= TOLERANCE:
            raise CandidError(
                f"The {form} file's '{name}' differs from PyTorch's by {value:.1e}, more than {TOLERANCE:g}: "
                "nothing was written; try another format, or other versions of torch and onnxruntime."
            )
    return differences


def difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest value over images of max |difference| / max(1, max |expected|), in float64.

    So it is relative for log densities, and for logits and latents to the largest of the image.

    >>> difference(torch.tensor([-2000.0]), torch.tensor([-2001.0]))
    0.0005
    """
    expected, found = (values.double().reshape(len(values), -1) for values in (expected, found))
    return float(((expected - found).abs().amax(1) / expected.abs().amax(1).clamp(min=1)).max())


def check_images(shape: tuple[int, int, int], count: int) -> Tensor:
    """Return 8-bit images in [0, 1], alternately noise and smooth, (count, C, H, W)."""
    random = generator(0, 13)
    noise = torch.randint(0, 256, (count, *shape), generator=random).float()
    coarse = torch.randint(0, 256, (count, shape[0], 4, 4), generator=random).float()
    smooth = F.interpolate(coarse, shape[1:], mode="bilinear", antialias=True).round().clamp(0, 255)
    return torch.where((torch.arange(count) % 2 == 0)[:, None, None, None], noise, smooth) / 255


def _expected(model: Any) -> Run:
    """Return the outputs of the model itself, which is not folded."""

    def run(images: Tensor) -> Sequence[Tensor]:
        latent = as_latent(model)
        if model.density_of == "features":
            return _of_features(model, images)
        if latent is None:
            return (model.logits(images),)
        outputs = latent(images)
        return outputs.logits, latent.log_density_of(outputs), outputs.z

    return run


def _onnx_runner(content: bytes) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda images: [torch.from_numpy(each) for each in session.run(None, {"images": images.numpy()})]


def _archive_runner(content: bytes) -> Run:
    with _quiet():
        return torch.export.load(io.BytesIO(content)).module()


def _write(content: bytes, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise CandidError(
            f"Can't write '{path}' ({error}): free some space, or choose another place."
        ) from error
