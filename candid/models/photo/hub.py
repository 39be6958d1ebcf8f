"""Networks as the Hugging Face Hub has them: what their files say, and what they need to be eyes.

A repository has an ONNX graph (``pixel_values`` to ``last_hidden_state``, ``pooler_output`` or
``image_embeds``), ``preprocessor_config.json`` (how a photo becomes pixel values) and ``config.json`` (the
patch size). :func:`adapted` adds to the graph what comes before and after it, so that it takes images in
[0, 1] and returns maps and features like any other file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candid._support.errors import CandidError
from candid.data.images import Preprocessing, Resampling

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

PREPROCESSOR = "preprocessor_config.json"
RESAMPLING: dict[Any, Resampling] = {2: "bilinear", 3: "bicubic"}
"""Numbers of PIL's filters."""
SAY_NOTHING = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", "auto_map"),
    *("_valid_processor_keys", "data_format", "input_data_format", "return_tensors", "device"),
    *("default_to_square", "do_convert_rgb"),
}
"""Keys that do not change pixels, or only together with others that are read."""
READ = {
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "crop_pct", "do_rescale"),
    *("rescale_factor", "do_normalize", "image_mean", "image_std"),
}
OUTPUTS = {"last_hidden_state", "pooler_output", "image_embeds"}
"""Outputs that are used, with logits, if a graph has any of them; attentions and hidden states are not."""
LEADING = 16
"""The most tokens that come before those of patches."""
OPSET = 13
LARGEST = 2**31 - 2**24
"""Bytes of a graph with its weights: the format can't hold more in one piece."""


@dataclass(frozen=True)
class HubInput:
    """How a network sees photos, from the JSON files next to it."""

    size: int
    scale: tuple[float, ...]
    """Multiplies images in [0, 1], for each channel."""
    shift: tuple[float, ...]
    """Is added then."""
    border: int = 0
    squash: bool = False
    resampling: Resampling = "bicubic"
    patch: int | None = None
    """Height and width of the patches that tokens stand for."""
    registers: int | None = None
    labels: tuple[str, ...] = ()
    """Names of the classes of a classifier."""

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes an image of its size."""
        square = 3, self.size, self.size
        return Preprocessing(*square, border=self.border, squash=self.squash, resampling=self.resampling)

    @classmethod
    def read(cls, path: Path) -> "HubInput | None":
        """Return what ``preprocessor_config.json`` and ``config.json`` say of a graph; None without them."""
        file = _near(path, PREPROCESSOR)
        if file is None:
            return None
        given, config = _json(file), _near(path, "config.json")
        model = {} if config is None else _json(config)
        vision = model.get("vision_config", model)
        patch = vision.get("patch_size")
        if isinstance(patch, list) and len(set(patch)) == 1:
            patch = patch[0]
        if patch is not None and (not isinstance(patch, int) or patch < 1):
            raise CandidError(f"'{config}' has the patch size {patch}, not one number of pixels.")
        labels = model.get("id2label") or {}
        names = tuple(str(labels[key]) for key in sorted(labels, key=int))
        fields = _pixels(given, file)
        return cls(**fields, patch=patch, registers=vision.get("num_register_tokens"), labels=names)


def _near(path: Path, name: str) -> Path | None:
    """Return a file next to a graph, or above it if its folder is ``onnx``."""
    folders = [path.parent, *([path.parent.parent] if path.absolute().parent.name == "onnx" else [])]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CandidError(f"'{file}' can't be read: {error}.") from error
    if not isinstance(content, dict):
        raise CandidError(f"'{file}' is no table of settings.")
    return content


def _pixels(given: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the fields of :class:`HubInput` that a preprocessor's settings mean."""
    unknown = [key for key, value in given.items() if value not in (None, False)]
    unknown = [key for key in unknown if key not in READ | SAY_NOTHING]
    if unknown:
        raise CandidError(
            f"'{file}' has the key '{unknown[0]}', which may change pixels and is not known here: remove it "
            "only if the network was trained without it."
        )
    if given.get("do_resize", True) is not True:
        raise CandidError(f"'{file}' says do_resize: false, but photos have any size.")
    resample = given.get("resample", 3)
    if resample not in RESAMPLING:
        raise CandidError(f"'{file}' has resample {resample}: 2 (bilinear) and 3 (bicubic) are known.")
    try:
        framing = _framing(given)
        factor = 255 * float(given.get("rescale_factor", 1 / 255)) if given.get("do_rescale", True) else 255.0
        mean, std = (0.0,) * 3, (1.0,) * 3
        if given.get("do_normalize", "image_mean" in given):
            mean, std = (tuple(map(float, given[key])) for key in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError("image_mean and image_std need three numbers each, image_std positive ones")
    except (KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CandidError(f"'{file}' does not say how photos become pixel values: {why}.") from error
    scale, shift = tuple(factor / each for each in std), tuple(-m / s for m, s in zip(mean, std, strict=True))
    return {"scale": scale, "shift": shift, "resampling": RESAMPLING[resample], **framing}


def _framing(given: dict[str, Any]) -> dict[str, Any]:
    """Return size, border and squash: which part of a photo becomes how many pixels."""
    crops, size = bool(given.get("do_center_crop", False)), given["size"]
    if isinstance(size, int):
        square = given.get("default_to_square", not crops)
        size = {"height": size, "width": size} if square else {"shortest_edge": size}
    squash, resized = "height" in size, _side(size)
    if set(size) - ({"height", "width"} if squash else {"shortest_edge"}):
        raise ValueError(f"the size {size} has an unknown key")
    seen = _side(given.get("crop_size", size)) if crops else resized
    if given.get("crop_pct") is not None and not crops:  # of ConvNeXt
        squash = resized >= 384
        resized = resized if squash else int(resized / float(given["crop_pct"]))
    if not 1 <= seen <= resized:
        raise ValueError(f"a crop of {seen} pixels does not fit into {resized}")
    return {"size": seen, "border": resized - seen, "squash": squash}


def _side(size: Any) -> int:
    if isinstance(size, int):
        return size
    if "shortest_edge" in size:
        return int(size["shortest_edge"])
    if size["height"] != size["width"]:
        raise ValueError(f"{size['height']} x {size['width']} is no square")
    return int(size["height"])


# graphs


def with_weights(content: bytes, path: Path) -> tuple[bytes, list[bytes]]:
    """Return a graph with the weights that it keeps in other files, and the content of these files."""
    if b"location" not in content:
        return content, []
    import onnx

    try:
        model = onnx.load_from_string(content)
    except Exception:  # onnxruntime says what is wrong with it
        return content, []
    outside = [
        (tensor, {entry.key: entry.value for entry in tensor.external_data})
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    ]
    files: dict[str, bytes] = {}
    for tensor, where in outside:
        name = where["location"]
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CandidError(f"its weights are in '{name}', outside of its folder.")
        if name not in files:
            try:
                files[name] = (path.parent / name).read_bytes()
            except OSError as error:
                raise CandidError(f"its weights are in '{name}', which can't be read: {error}.") from error
        start = int(where.get("offset", 0))
        stop = start + int(where["length"]) if "length" in where else len(files[name])
        if stop > len(files[name]):
            raise CandidError(f"its weights are in '{name}', which is cut.")
        tensor.raw_data = files[name][start:stop]
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
    if not outside:
        return content, []
    if model.ByteSize() > LARGEST:
        raise CandidError("its weights take more than 2 GB: use a smaller or a quantized network.")
    return model.SerializeToString(), [files[name] for name in sorted(files)]


def adapted(content: bytes, session: "InferenceSession", path: Path, given: HubInput | None) -> bytes | None:
    """Return a graph that takes images in [0, 1], (B, 3, S, S), and returns maps and features.

    Pixel values are computed as ``given`` says. Tokens (B, T, C) become features, the first one if there are
    more than patches, and maps (B, C, S / patch, S / patch), the last ones. Inputs of type uint8 get pixels
    from 0 to 255, and inputs (B, S, S, 3) get channels last.

    Returns:
        the graph, or None if it is such a graph already, or can't become one.
    """
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 else []
    if len(shape) != 4 or isinstance(shape[0], int):
        return None
    last = shape[3] == 3 and shape[1] != 3
    sides = shape[1:3] if last else shape[2:]
    fixed = {side for side in sides if isinstance(side, int)}
    size = given.size if given is not None else fixed.pop() if len(fixed) == 1 else None
    if size is None or any(isinstance(side, int) and side != size for side in sides):
        if given is not None:
            raise CandidError(f"it takes {sides[0]} x {sides[1]} pixels, but {PREPROCESSOR} says {size}.")
        return None
    if given is None and not all(isinstance(side, int) for side in sides):
        return None
    kind = inputs[0].type.removeprefix("tensor(").removesuffix(")")
    if kind not in ("float", "float16", "uint8"):
        raise CandidError(f"its input is of type {kind}, not float, float16 or uint8.")
    square = (2, size, size, 3) if last else (2, 3, size, size)
    images = np.zeros(square, np.float32 if kind == "float" else kind)
    kept = names = [each.name for each in session.get_outputs()]
    if OUTPUTS & set(names):
        kept = [name for name in names if name in OUTPUTS | {"logits"}]
    try:
        shapes = {
            name: output.shape
            for name, output in zip(kept, session.run(kept, {inputs[0].name: images}), strict=True)
        }
    except Exception as error:  # onnxruntime has many exceptions of its own
        raise CandidError(f"it does not run on images of {size} x {size} pixels: {error}") from error
    tokens = any(len(shape) == 3 for shape in shapes.values())
    if given is None and not tokens and not last and kind == "float" and kept == names:
        return None
    return _Adapter(content, size, given).graph(kind, last, shapes)


class _Adapter:
    """Adds nodes before and after a graph."""

    def __init__(self, content: bytes, size: int, given: HubInput | None) -> None:
        import onnx
        from onnx import version_converter

        self.model = onnx.load_from_string(content)
        version = next(part.version for part in self.model.opset_import if not part.domain)
        if version < OPSET:
            self.model = version_converter.convert_version(self.model, OPSET)
        self.size, self.given = size, given
        self.before: list[Any] = []
        self.after: list[Any] = []

    def graph(self, kind: str, last: bool, shapes: dict[str, tuple[int, ...]]) -> bytes:
        """Return the graph with outputs of these shapes, whose input is of a type, and has channels last."""
        from onnx import TensorProto, helper

        graph = self.model.graph
        initial = {part.name for part in graph.initializer}
        (start,) = (part.name for part in graph.input if part.name not in initial)
        self._pixels(start, kind, last)
        outputs = [
            output
            for name, shape in shapes.items()
            for output in (self._tokens(name, shape, shapes) if len(shape) == 3 else [(name, shape)])
        ]
        nodes = [*self.before, *graph.node, *self.after]
        del graph.node[:], graph.input[:], graph.output[:]
        square = ["N", 3, self.size, self.size]
        graph.input.append(helper.make_tensor_value_info("candid_images", TensorProto.FLOAT, square))
        for name, shape in outputs:
            as_float = f"candid_{name}"
            nodes.append(helper.make_node("Cast", [name], [as_float], to=TensorProto.FLOAT))
            dims = ["N", *shape[1:]]
            graph.output.append(helper.make_tensor_value_info(as_float, TensorProto.FLOAT, dims))
        graph.node.extend(nodes)
        content: bytes = self.model.SerializeToString()
        return content

    def _pixels(self, start: str, kind: str, last: bool) -> None:
        """Add what makes ``start``, the input of the network, of images in [0, 1]."""
        from onnx import TensorProto

        if kind == "uint8":
            if self.given is not None and (len({*self.given.scale}) > 1 or any(self.given.shift)):
                raise CandidError(f"it takes pixels of type uint8, but {PREPROCESSOR} normalizes them.")
            x = self._node("Mul", "candid_images", self._constant(255, np.float32))
            x = self._node("Cast", self._node("Round", x), to=TensorProto.UINT8)
        else:
            scale, shift = ((1.0,), (0.0,)) if self.given is None else (self.given.scale, self.given.shift)
            by, plus = (
                self._constant(np.reshape(each, (1, -1, 1, 1)), np.float32) for each in (scale, shift)
            )
            x = self._node("Add", self._node("Mul", "candid_images", by), plus)
            if kind == "float16":
                x = self._node("Cast", x, to=TensorProto.FLOAT16)
        if last:
            x = self._node("Transpose", x, perm=[0, 2, 3, 1])
        self._node("Identity", x, output=start)

    def _tokens(
        self, name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Add what divides tokens into the first one and maps of the last ones; return their names."""
        patch = None if self.given is None else self.given.patch
        if self.given is None or patch is None:
            raise CandidError(
                f"its output '{name}' is tokens {shape}: it needs a {PREPROCESSOR}, and a config.json with "
                "'patch_size', next to it."
            )
        side, registers = self.size // patch, self.given.registers
        leading = shape[1] - side**2
        right = 0 <= leading <= LEADING and (not registers or leading in (registers, registers + 1))
        if not right:
            raise CandidError(
                f"its output '{name}' has {shape[1]} tokens, but {self.size} pixels are {side} x {side} "
                f"patches of {patch} pixels, with at most {LEADING} tokens before them, or those that "
                "config.json says."
            )
        axis, end = self._constant([1]), self._constant([np.iinfo(np.int64).max])
        maps = self._node("Slice", name, self._constant([-(side**2)]), end, axis, later=True)
        maps = self._node("Transpose", maps, perm=[0, 2, 1], later=True)
        maps = self._node("Reshape", maps, self._constant([0, shape[2], side, side]), later=True)
        outputs: list[tuple[str, tuple[int, ...]]] = []
        if leading and not {"pooler_output", "image_embeds"} & set(shapes):  # these are made of the first one
            first = self._node("Slice", name, self._constant([0]), self._constant([1]), axis, later=True)
            first = self._node("Reshape", first, self._constant([0, shape[2]]), later=True)
            outputs.append((first, (shape[0], shape[2])))
        return [*outputs, (maps, (shape[0], shape[2], side, side))]

    def _node(self, kind: str, *inputs: str, output: str = "", later: bool = False, **attributes: Any) -> str:
        from onnx import helper

        output = output or f"candid_{len(self.before)}_{len(self.after)}"
        nodes = self.after if later else self.before
        nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def _constant(self, values: Any, dtype: Any = np.int64) -> str:
        from onnx import numpy_helper

        name = f"candid_constant_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name
