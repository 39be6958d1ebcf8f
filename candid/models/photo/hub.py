"""Networks as the Hugging Face Hub has them: what their files say, and what they need to be eyes.

A repository has an ONNX graph (``pixel_values`` to ``last_hidden_state``, ``pooler_output`` or
``image_embeds``), ``preprocessor_config.json`` (how a photo becomes pixel values) and ``config.json`` (the
patch size). Its name is ``hf:OWNER/NAME``, with ``@REVISION`` and ``:FILE`` if these are not the usual ones.
Models store the commit. What a name means is downloaded once, by training or ``candid eyes``, and never when
a model is used.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError, require_extra
from candid.data.images import Preprocessing, Resampling
from candid.models.photo.eye import PREPROCESSOR

NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(:(?P<file>[\w./-]+\.onnx))?")
USUAL = ("onnx/vision_model.onnx", "onnx/model.onnx", "model.onnx")
"""Files that are looked for if a name has none."""
FREE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc-by-4.0", "cc0-1.0", "isc", "unlicense"}
"""Licences that allow any use."""
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
        vision = vision if isinstance(vision, dict) else {}
        patch, registers = vision.get("patch_size"), vision.get("num_register_tokens")
        if isinstance(patch, list) and len(set(patch)) == 1:
            patch = patch[0]
        for key, value in {"patch_size": patch, "num_register_tokens": registers}.items():
            if value is not None and (not isinstance(value, int) or value < (key == "patch_size")):
                raise CandidError(f"'{config}' has {key} {value}, which is no number of that kind.")
        labels = model.get("id2label")
        labels = labels if isinstance(labels, dict) and all(key.isdecimal() for key in labels) else {}
        names = tuple(str(labels[key]) for key in sorted(labels, key=int))
        fields = _pixels(given, file)
        return cls(**fields, patch=patch, registers=registers, labels=names)


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
        mean: tuple[float, ...] = (0.0,) * 3
        std: tuple[float, ...] = (1.0,) * 3
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


# repositories


@dataclass(frozen=True)
class HubFiles:
    """A graph of the Hub in the cache on this machine."""

    name: str
    """With its commit and its file."""
    path: Path
    licence: str
    """That of the card; what is not known to be free says so."""


def fetched(name: str, download: bool = True) -> HubFiles:
    """Return where the files of ``hf:OWNER/NAME[@REVISION][:FILE]`` are.

    Args:
        name: without a revision, the newest commit.
        download: whether files may be downloaded; never if ``HF_HUB_OFFLINE`` is set.

    Raises:
        CandidError: if there is no such repository or file, if it is gated, or without network.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise CandidError(f"'{name}' is no name of the Hub: write hf:OWNER/NAME[@REVISION][:FILE.onnx].")
    hub = require_extra("huggingface_hub", "hub", f"The eye '{name}'")
    from huggingface_hub import constants

    repository, revision = match["repo"], match["revision"] or "main"
    files = USUAL if match["file"] is None else (match["file"],)
    offline, pinned = bool(constants.HF_HUB_OFFLINE), re.fullmatch("[0-9a-f]{40}", revision)
    path = _cached(hub, repository, revision, files) if pinned or offline or not download else None
    if path is None and offline:
        raise CandidError(f"'{name}' is not in the cache of the Hub, and HF_HUB_OFFLINE is set.")
    if path is None and not download:
        raise CandidError(f"'{name}' is not in the cache of the Hub: get it with 'candid eyes {name}'.")
    path = path or _downloaded(hub, repository, revision, files)
    parts = path.parts[len(path.parts) - path.parts[::-1].index("snapshots") :]  # commit, folders, file
    folder = path.parents[len(parts) - 2]
    return HubFiles(f"hf:{repository}@{parts[0]}:{'/'.join(parts[1:])}", path, _licence(hub, folder))


def _cached(hub: Any, repository: str, revision: str, files: tuple[str, ...]) -> Path | None:
    found = (hub.try_to_load_from_cache(repository, file, revision=revision) for file in files)
    return next((Path(each) for each in found if isinstance(each, str)), None)


def _downloaded(hub: Any, repository: str, revision: str, files: tuple[str, ...]) -> Path:
    """Download a graph and what belongs to it, the graph last: if it is there, all is."""
    from huggingface_hub import errors

    try:
        found = hub.HfApi().model_info(repository, revision=revision, timeout=30)
        names = sorted(each.rfilename for each in found.siblings)
        graph = next((file for file in files if file in names), None)
        if graph is None:
            others = ", ".join(each for each in names if each.endswith(".onnx")) or "none"
            raise CandidError(f"'{repository}' has no {' or '.join(files)}; its ONNX files: {others}.")
        wanted = [each for each in (PREPROCESSOR, "config.json", "README.md") if each in names]
        wanted += [each for each in names if each.startswith(graph) and each != graph]
        paths = [hub.hf_hub_download(repository, each, revision=found.sha) for each in (*wanted, graph)]
        # the cache then knows which commit the name means, for HF_HUB_OFFLINE
        hub.hf_hub_download(repository, (*wanted, graph)[0], revision=revision)
    except CandidError:
        raise
    except errors.GatedRepoError as error:
        raise CandidError(
            f"'{repository}' is gated: accept its licence on its page, and log in with 'hf auth login'."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CandidError(f"'{repository}' has no revision '{revision}'.") from error
    except errors.RepositoryNotFoundError as error:
        raise CandidError(
            f"There is no repository '{repository}' on the Hub, or it is private: check its name, or log in "
            "with 'hf auth login'."
        ) from error
    except Exception as error:  # of several libraries
        raise CandidError(
            f"'{repository}' can't be downloaded from the Hub ({type(error).__name__}): check the network, "
            "or use an eye that is installed, such as lite0."
        ) from error
    return Path(paths[-1])


def _licence(hub: Any, folder: Path) -> str:
    """Return what the card in a folder says; if it is not known to be free, with a warning."""
    try:
        card = hub.ModelCard.load(folder / "README.md").data
        licence = card.license_name if card.license == "other" else card.license
    except Exception:  # no card, or one that can't be read
        licence = None
    licence = str(licence or "unknown")
    return licence if licence in FREE else f"{licence}: not known to be free, read its card"
