"""Pretrained feature extractors: :func:`open_eye` finds one by its name."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from candid._support.errors import CandidError, did_you_mean
from candid.models.eyes.registry import EYES

if TYPE_CHECKING:
    from candid.models.eyes.eye import Eye
    from candid.models.protocol import Model

FILES = (".onnx", ".pt2")
TIMM = "timm:"
LOADERS: "list[Callable[[str], Model | None]]" = []
"""What else finds a model by its name: :mod:`candid.models.checkpoint` adds itself to this list."""


def open_eye(name: str) -> "Eye":
    """Return the eye that ``name`` means.

    Args:
        name: an eye of :data:`~candid.models.eyes.registry.EYES`; ``timm:NAME`` if timm is installed; an
            ONNX or ``.pt2`` file; the folder or name of a ResNet of candid; or several of these, joined
            by ``+``.

    Raises:
        CandidError: if there is no such eye, or if its weights are missing or changed.

    Example:
        >>> open_eye("lite0").dimensions
        1408
    """
    from candid.models.eyes.eye import JoinedEyes, PackagedEye

    if "+" in name and not Path(name).exists():
        return JoinedEyes([open_eye(part) for part in name.split("+")])
    if name in EYES:
        return PackagedEye(EYES[name])
    if name.startswith(TIMM):
        return _timm(name)
    path = Path(name).expanduser()
    if path.suffix in FILES:
        from candid.models.eyes.files import ExportedEye, OnnxEye

        return OnnxEye(path) if path.suffix == ".onnx" else ExportedEye(path)
    for load in LOADERS:
        if model := load(name):
            return resnet_eye(model, absolute(name))
    raise CandidError(
        f"There is no eye '{name}': {did_you_mean(name, EYES)} Or name an ONNX or .pt2 file, or a folder "
        "with a ResNet."
    )


def absolute(name: str) -> str:
    """Return the whole path if ``name`` is a file or folder, so that it can be found from anywhere."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def moved(name: str, folder: Path | None) -> str:
    """Return the name of an eye; files that are gone are replaced by those of their name in ``folder``."""
    if folder is None or Path(name).exists():
        return name
    parts = []
    for part in name.split("+"):
        near = folder / Path(part).name
        gone = Path(part).suffix in FILES and not Path(part).exists()
        parts.append(str(near) if gone and near.is_file() else part)
    return "+".join(parts)


def _timm(name: str) -> "Eye":
    from candid.models.eyes.eye import ModuleEye

    try:
        import timm  # type: ignore[import-not-found]
    except ImportError as error:
        raise CandidError(f"The eye '{name}' needs timm: get it with 'pip install timm'.") from error
    network = timm.create_model(name.removeprefix(TIMM), pretrained=True)
    settings = timm.data.resolve_model_data_config(network)
    layers = [each["module"] for each in network.feature_info][-4:]
    return ModuleEye(network, layers, settings["input_size"][-1], name, settings["mean"], settings["std"])


def resnet_eye(model: "Model", name: str) -> "Eye":
    """Return the eye that a loaded ResNet is."""
    from candid.models.eyes.eye import ModuleEye
    from candid.models.resnet import ResNet

    if not isinstance(model, ResNet) or model.image_shape[0] != 3 or len({*model.image_shape[1:]}) > 1:
        raise CandidError(f"'{name}' can't be an eye: it must be a ResNet that takes square colour images.")
    layers = [f"layer{stage}" for stage in range(1, len(model.config.blocks) + 1)][-4:]
    return ModuleEye(model, layers, model.image_shape[1], name)
