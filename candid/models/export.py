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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candid._support import __version__
from candid._support.errors import CandidError, require_extra
from candid._support.files import replacing
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid._support.text import short_name
from candid.models import Format, checkpoint
from candid.models.photo.efficientnet import session_of

if TYPE_CHECKING:
    import torch

Run = Callable[[Array], Sequence[Array]]
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
"""Tolerance of the largest difference from the model, as :func:`difference` measures it."""
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
    """Largest difference from the model by output; see :func:`difference`."""
    verdicts: Path | None = None
    """The JSON file with the rest that verdicts need."""


def export(
    model: Any,
    out: str | os.PathLike[str] = ".",
    formats: Sequence[Format] | None = None,
    batch: int | None = None,
    name: str | os.PathLike[str] = "model",
) -> list[Exported]:
    """Write a model as files for other programs; each is run and compared with the model before.

    Args:
        model: a model, its folder, the folder of a run, or a bundled name.
        out: a file, whose ending then says the format (.onnx, .pt2), or a folder.
        formats: of the files in a folder; None for ONNX.
        batch: the number of images that the network takes at a time; None for any.
        name: of the files in a folder, if ``model`` is neither a name nor a folder.

    Returns:
        The files that were written. If one of them is wrong, none is written.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     export("cifar10-resnet", folder, formats=("torch-export",), batch=1)[0].path.name
    'cifar10-resnet.pt2'
    """
    name = model if isinstance(model, str | os.PathLike) else name
    targets = _targets(Path(name), Path(out), formats)
    if batch is not None and batch < 1:
        raise CandidError(f"--batch takes a number from 1 on, or 'dynamic', not {batch}.")
    model = checkpoint.resolve(model)
    if model.density_of == "features" and "mixture" in model.can:
        raise CandidError(
            f"A {model.kind} model can't be exported: train a photo model, or a pixel model, for that."
        )
    metadata = metadata_of(model)
    graph = _photo_graph(model, batch) if "onnx" in targets.values() else None
    if graph is None or "torch-export" in targets.values():
        program = _program(model, batch, "onnx" in targets.values() and graph is None)
    contents = {
        file: _archive(program, metadata)
        if form == "torch-export"
        else _onnx(_network_graph(program, metadata) if graph is None else graph, metadata)
        for file, form in targets.items()
    }
    exported = [
        Exported(file, form, batch, len(contents[file]), _checked(model, contents[file], form, batch))
        for file, form in targets.items()
    ]
    for file, content in contents.items():
        _write(content, file)
    return exported


def _targets(path: Path, out: Path, formats: Sequence[Format] | None) -> dict[Path, Format]:
    """Return the files to write and their formats."""
    ending = {form: suffix for suffix, form in ENDINGS.items()}
    if out.suffix not in ENDINGS or out.is_dir():
        if out.is_file():
            raise CandidError(f"'{out}' is a file: name a folder, or a file that ends in .onnx or .pt2.")
        return {out / f"{short_name(path)}{ending[form]}": form for form in formats or ("onnx",)}
    form = ENDINGS[out.suffix]
    if formats is not None and tuple(formats) != (form,):
        raise CandidError(
            f"'{out.name}' would be of the format {form}, not {' and '.join(formats)}: name a folder "
            "instead, or change the ending."
        )
    return {out: form}


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
    return list(FEATURES if "eye" in model.can else PIXELS if "invert" in model.can else ("logits",))


def _photo_graph(model: Any, batch: int | None) -> Any:
    """Return eye and head as one ONNX model; None if torch runs the eye, or if there is none."""
    if "eye" not in model.can:
        return None
    from candid.models.photo.traced import graph_of

    return graph_of(model, "batch" if batch is None else batch)


def _program(model: Any, batch: int | None, onnx: bool) -> "torch.export.ExportedProgram":
    """Return the network as a graph of torch, for a fixed or any number of images."""
    if onnx:
        require_extra("onnxscript", "export", "The ONNX file of a network, unlike --format torch-export,")
    torch = require_extra("torch", "paper", "The export of a network, or to torch.export,")
    sample = torch.zeros(2 if batch is None else batch, *model.image_shape)  # of one, torch takes no other
    shapes = {"images": {0: torch.export.Dim("batch", min=1, max=2**16)} if batch is None else None}
    strict = "eye" not in model.can  # what eyes do besides tensors can't be traced strictly
    try:
        with _quiet():
            return torch.export.export(_module(model), (sample,), dynamic_shapes=shapes, strict=strict)
    except RuntimeError as error:
        raise _refused(error, batch) from error


def _module(model: Any) -> "torch.nn.Module":
    """Return a module from images to plain float32 tensors: logits, and what a generative model has more."""
    import torch

    if "eye" in model.can:
        from candid.models.photo.torch_models import photo_module

        network: Any = photo_module(model)
    else:
        network = model.frozen()
    for part in network.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name.startswith("inverse_"):  # the way back is not exported
                setattr(part, name, buffer.new_empty(0))
    constant = -model.dimensions * model.bits_offset * math.log(2) if "invert" in model.can else 0.0

    class Inference(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if "eye" in model.can:
                outputs = self.network.tensor_outputs(images)
                return outputs.logits, outputs.novelty
            if "invert" not in model.can:
                return (self.network(images),)
            from candid.models.flow.mixture import log_standard_normal

            z, log_det, logits = self.network(images)
            return logits, logits.logsumexp(1) + log_standard_normal(z) + log_det + constant, z

    return Inference().eval().requires_grad_(False)


def _network_graph(program: "torch.export.ExportedProgram", metadata: dict[str, str]) -> Any:
    """Return a network as an ONNX model."""
    import torch

    names = list(json.loads(metadata["outputs"]))
    try:
        with _quiet():
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=names
            )
            assert made is not None
            model = made.model_proto
    except RuntimeError as error:
        raise _refused(error, None) from error
    _name_the_batch(model.graph)
    return model


def _onnx(model: Any, metadata: dict[str, str]) -> bytes:
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    try:
        return bytes(model.SerializeToString())
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


def _archive(program: "torch.export.ExportedProgram", metadata: dict[str, str]) -> bytes:
    import torch

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
    import torch

    reason = str(error).strip().split("\n")[0]
    advice = "try --batch 1" if batch is None else "try another torch"
    return CandidError(f"torch {torch.__version__} can't export this network ({reason}): {advice}.")


def _checked(model: Any, content: bytes, form: Format, batch: int | None) -> dict[str, float]:
    """Return the largest differences between what the file computes and what the model does."""
    run = _onnx_runner(content) if form == "onnx" else _archive_runner(content)
    images = check_images(model.image_shape, CHECKED if batch is None else batch)
    actual = _joined(run, np.split(images, [1]) if batch is None else [images])
    expected = _joined(_expected(model), np.split(images, range(8, len(images), 8)))
    differences = {
        name: max(map(difference, ours.T, theirs.T)) if name == "novelty" else difference(ours, theirs)
        for name, ours, theirs in zip(_outputs(model), expected, actual, strict=True)
    }
    for name, value in differences.items():
        if not value <= TOLERANCE:
            raise CandidError(
                f"The {form} file's '{name}' differs from PyTorch's by {value:.1e}, more than {TOLERANCE:g}: "
                "nothing was written; try another format, or other versions of torch and onnxruntime."
            )
    return differences


def _joined(run: Run, parts: Sequence[Array]) -> list[Array]:
    return [np.concatenate(outputs) for outputs in zip(*map(run, parts), strict=True)]


def difference(expected: Array, actual: Array) -> float:
    """Return the largest value over images of max |difference| / max(1, max |expected|), in float64.

    So it is relative for log densities, and for logits and latents to the largest of the image.

    >>> difference(np.array([-2000.0]), np.array([-2001.0]))
    0.0005
    """
    expected, actual = (values.astype(np.float64).reshape(len(values), -1) for values in (expected, actual))
    return float((abs(expected - actual).max(1) / abs(expected).max(1).clip(min=1)).max())


def check_images(shape: tuple[int, int, int], count: int) -> Array:
    """Return 8-bit images in [0, 1], alternately noise and smooth, (count, C, H, W)."""
    from PIL import Image

    random, (channels, height, width) = draws(0, 13), shape
    noise = random.integers(256, count * math.prod(shape)).reshape(count, *shape)
    coarse = random.integers(256, count * channels * 16).reshape(-1, 4, 4).astype(np.float32)
    larger = [Image.fromarray(each).resize((width, height), Image.Resampling.BILINEAR) for each in coarse]
    smooth = np.stack([np.asarray(each) for each in larger]).reshape(count, *shape).round().clip(0, 255)
    images = np.where((np.arange(count) % 2 == 0)[:, None, None, None], noise, smooth)
    return images.astype(np.float32) / np.float32(255)


def _expected(model: Any) -> Run:
    """Return what gives the outputs of the model itself, which is not folded."""

    def run(images: Array) -> Sequence[Array]:
        outputs = model.outputs(images)
        if "eye" in model.can:
            return outputs.logits, outputs.novelty
        if "invert" in model.can:
            return outputs.logits, outputs.log_density_terms.sum(1), outputs.latent
        return (outputs.logits,)

    return run


def _onnx_runner(content: bytes) -> Run:
    session = session_of(content)
    return lambda images: session.run(None, {"images": images})


def _archive_runner(content: bytes) -> Run:
    import torch

    with _quiet():
        program: Any = torch.export.load(io.BytesIO(content)).module()
    return lambda images: [part.detach().numpy() for part in program(torch.from_numpy(images))]


def _write(content: bytes, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise CandidError(
            f"Can't write '{path}' ({error}): free some space, or choose another place."
        ) from error
