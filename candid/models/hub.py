"""The Hugging Face Hub: networks that are eyes, and models of candid.

The repository of a network has an ONNX graph (``pixel_values`` to ``last_hidden_state``, ``pooler_output`` or
``image_embeds``), ``preprocessor_config.json`` (how a photo becomes pixel values) and ``config.json`` (the
patch size). Its name is ``hf:OWNER/NAME``, with ``@REVISION`` and ``:FILE`` if these are not the usual ones.
The repository of a model has the files of its folder; its name is ``hf:OWNER/NAME[@REVISION]``.

Only what a user names is downloaded: an eye for training, or a model. It stays in the Hub's cache, and what
is there needs no network. Models store the commit of their eye, which is not downloaded when they are used.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError, require_extra
from candid._support.text import plural
from candid.data.images import Preprocessing, Resampling
from candid.models import zoo
from candid.models.photo.eye import PREPROCESSOR

NAME = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(:(?P<file>[\w./-]+\.onnx))?")
USUAL = ("onnx/vision_model.onnx", "onnx/model.onnx", "model.onnx")
"""Files that are looked for if a name has none."""
OF_MODELS = re.compile(r"[\w.-]+\.(safetensors|onnx|onnx[._][\w.-]+)|config\.json|README\.md|" + PREPROCESSOR)
"""Files that the folder of a model may have next to its record."""
FREE = {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc-by-4.0", "cc0-1.0", "isc", "unlicense"}
"""Licences that allow any use."""
RESAMPLING: dict[Any, Resampling] = {2: "bilinear", 3: "bicubic"}
"""Numbers of PIL's filters."""
TENSORS = re.compile(r"[a-z_]+-[0-9a-f]{16}\.safetensors")
"""Files of tensors as models of candid have them."""
log = logging.getLogger("candid")
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
        file = near(path, PREPROCESSOR)
        if file is None:
            return None
        given, config = _json(file), near(path, "config.json")
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


def near(path: Path, name: str) -> Path | None:
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
    """Files of the Hub in the cache on this machine."""

    name: str
    """With its commit, and with the file of a graph."""
    path: Path
    """A graph, or the folder of a model."""
    licence: str
    """That of the card; what is not known to be free says so."""


def fetched(name: str, download: bool = True) -> HubFiles:
    """Return where the files of the network ``hf:OWNER/NAME[@REVISION][:FILE]`` are.

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

    def chosen(names: list[str]) -> list[str]:
        graph = next((file for file in files if file in names), None)
        if graph is None:
            others = ", ".join(each for each in names if each.endswith(".onnx")) or "none"
            raise CandidError(f"'{repository}' has no {' or '.join(files)}; its ONNX files: {others}.")
        wanted = [each for each in (PREPROCESSOR, "config.json", "README.md") if each in names]
        return [*wanted, *(each for each in names if each.startswith(graph) and each != graph), graph]

    instead = "check the network, or use an eye that is installed, such as lite0"
    path = path or _downloaded(hub, repository, revision, chosen, instead)
    parts = path.parts[len(path.parts) - path.parts[::-1].index("snapshots") :]  # commit, folders, file
    folder = path.parents[len(parts) - 2]
    return HubFiles(f"hf:{repository}@{parts[0]}:{'/'.join(parts[1:])}", path, licence_of(card_in(folder)))


def fetched_model(name: str, newest: bool = False) -> HubFiles:
    """Return where the folder of the model ``hf:OWNER/NAME[@REVISION]`` is.

    What the cache has is used without network. Anything else is downloaded, and the commit is said.

    Args:
        name: without a revision, the commit that was downloaded last, or the newest one.
        newest: whether to ask the Hub for the newest commit, unless ``HF_HUB_OFFLINE`` is set.

    Raises:
        CandidError: if there is no such repository, if it has no model, if it is gated, or without network.
    """
    match = NAME.fullmatch(name)
    if match is None or match["file"] is not None:
        raise CandidError(f"'{name}' is no name of a model on the Hub: write hf:OWNER/NAME[@REVISION].")
    hub = require_extra("huggingface_hub", "hub", f"The model '{name}'")
    from huggingface_hub import constants

    repository, revision = match["repo"], match["revision"] or "main"
    cached = _cached(hub, repository, revision, (zoo.RECORD,))
    if cached is None and constants.HF_HUB_OFFLINE:
        raise CandidError(f"The model '{name}' is not in the cache of the Hub, and HF_HUB_OFFLINE is set.")
    if cached is not None and (constants.HF_HUB_OFFLINE or not newest):
        return _model_in(repository, cached.parent)

    def chosen(names: list[str]) -> list[str]:
        if zoo.RECORD not in names:
            raise CandidError(
                f"'{repository}' has no {zoo.RECORD}, so it is no model of candid: an ONNX network can be an "
                f"eye (candid train --eye hf:{repository}), a classifier can be adopted (candid adopt)."
            )
        return [*filter(OF_MODELS.fullmatch, names), zoo.RECORD]

    record = _downloaded(hub, repository, revision, chosen, "check the network, or name a folder")
    files = _model_in(repository, record.parent)
    if cached is None or cached.parent != files.path:
        log.warning("%s always means this commit; its licence: %s", files.name, files.licence)
    return files


def _model_in(repository: str, folder: Path) -> HubFiles:
    return HubFiles(f"hf:{repository}@{folder.name}", folder, licence_of(card_in(folder)))


def _cached(hub: Any, repository: str, revision: str, files: tuple[str, ...]) -> Path | None:
    found = (hub.try_to_load_from_cache(repository, file, revision=revision) for file in files)
    return next((Path(each) for each in found if isinstance(each, str)), None)


def _downloaded(
    hub: Any, repository: str, revision: str, chosen: Callable[[list[str]], list[str]], instead: str
) -> Path:
    """Download the files that ``chosen`` returns, the last of them last: if it is there, all are."""
    with asking(repository, revision, "can't be downloaded from the Hub", instead):
        found = hub.HfApi().model_info(repository, revision=revision, timeout=30, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings}
        files = chosen(sorted(sizes))
        size = sum(map(sizes.__getitem__, files)) / 1e6
        missing = [each for each in files if _cached(hub, repository, found.sha, (each,)) is None]
        if missing:
            log.warning(
                "downloading %s from the Hub: %s, %.1f MB", repository, plural(len(files), "file"), size
            )
        paths = [hub.hf_hub_download(repository, each, revision=found.sha) for each in files]
        # the cache then knows which commit the name means, for HF_HUB_OFFLINE
        hub.hf_hub_download(repository, files[0], revision=revision)
    return Path(paths[-1])


@contextmanager
def asking(repository: str, revision: str, failed: str, instead: str) -> Iterator[None]:
    """Turn what the Hub refuses, and a missing network, into one sentence."""
    from huggingface_hub import errors

    try:
        yield
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
        raise CandidError(f"'{repository}' {failed} ({_reason(error)}): {instead}.") from error


def _reason(error: Exception) -> str:
    """Return the kind of an error, or the answer of the Hub."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    return type(error).__name__ if code is None else f"it answers {code}"


def licence_of(card: str) -> str:
    r"""Return the licence on a card; if it is not known to be free, with a warning.

    >>> licence_of("---\nlicense: mit\n---\n# A model")
    'mit'
    """
    head = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    given = re.findall(r"^(license\w*): *[\"']?([^\"'\n]+?)[\"']? *$", head[1] if head else "", re.MULTILINE)
    lines = {"license": "unknown", **dict(given)}
    licence = lines.get("license_name", "other") if lines["license"] == "other" else lines["license"]
    return licence if licence in FREE else f"{licence}: not known to be free, read its card"


def card_in(folder: Path) -> str:
    """Return the README.md in a folder; "" without one."""
    try:
        return (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):  # none, or one that can't be read
        return ""


def upload(repository: str, files: dict[str, Path | bytes], private: bool) -> str:
    """Put files into a repository, in one commit, and return the commit.

    The repository is made if there is none. Tensors of an earlier model there are removed.
    """
    hub = require_extra("huggingface_hub", "hub", "An upload to the Hub")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise CandidError("Nothing can be uploaded while HF_HUB_OFFLINE is set.")
    if hub.get_token() is None:
        raise CandidError("The Hub needs to know who you are: log in with 'hf auth login', or set HF_TOKEN.")
    api = hub.HfApi()
    instead = "check the network, the name, and whether your token may write there"
    with asking(repository, "main", "can't be uploaded to the Hub", instead):
        api.create_repo(repository, exist_ok=True, private=private or None)
        there = [each.rfilename for each in api.model_info(repository).siblings or ()]
        old = [each for each in there if TENSORS.fullmatch(each) and each not in files]
        operations = [
            *(hub.CommitOperationAdd(each, content) for each, content in files.items()),
            *(hub.CommitOperationDelete(each) for each in old),
        ]
        message = "Upload a model with candid push"
        return str(api.create_commit(repository, operations, commit_message=message).oid)
