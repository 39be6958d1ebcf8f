"""The models under audit: loaded once, checked before anything long runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from candid._support.errors import CandidError
from candid._support.files import safe_name
from candid.data.datasets import open_images, open_part
from candid.data.splits import Split
from candid.inference.study import named_models
from candid.models.protocol import Model
from candid.reports.audit.options import AuditOptions
from candid.trust.judge import HeldOut


@dataclass(frozen=True)
class AuditedModel:
    """A model under audit."""

    name: str
    path: str
    """What the user named: a folder, a bundled model, or the file of a classifier's test images."""
    loaded: Model | None
    """None if only arrays of it are stored."""
    held_out: int
    """Number of held-out images behind its p-values; 0 if it was never calibrated."""

    @property
    def model(self) -> Model:
        """The model itself."""
        assert self.loaded is not None
        return self.loaded

    @property
    def beta(self) -> float | None:
        """The beta that it was trained with."""
        return None if self.loaded is None else self.loaded.record.beta

    @property
    def is_generative(self) -> bool:
        """Whether it has a density and class means in latent space."""
        return hasattr(self.loaded, "mixture")  # an adopted model has one density for all classes

    @property
    def folder(self) -> str:
        """The name of its folders."""
        return safe_name(self.name)

    @property
    def parameters(self) -> int | None:
        """The number of its parameters; None if it is not known. A head in closed form counts, an eye not."""
        if self.loaded is None:
            return None
        trained = sum(each.numel() for each in self.loaded.parameters())
        return trained or sum(each.numel() for each in self.loaded.state_dict().values())


def audited_models(models: Any, data: str, options: AuditOptions) -> tuple[list[AuditedModel], bool]:
    """Return the loaded models, and whether the images of ``data`` can be looked up one by one."""
    given = list(models) if isinstance(models, list | tuple) else [models]
    given = list({str(each) if isinstance(each, str | Path) else id(each): each for each in given}.values())
    found = []
    for source, (name, model) in zip(given, named_models(given).items(), strict=True):
        path = str(source) if isinstance(source, str | Path) else name
        held_out = HeldOut.of(model)
        found.append(AuditedModel(name, path, model, 0 if held_out is None else len(held_out)))
    folders = [each.folder for each in found]
    for each in found:
        if folders.count(each.folder) > 1:
            raise CandidError(f"The name of '{each.name}' is too similar to another model's: rename it.")
    return found, _check_data(found, data, options)


def _check_data(models: Sequence[AuditedModel], data: str, options: AuditOptions) -> bool:
    """Check that all models see the same images, and return whether these can be looked up one by one."""
    first, *others = models
    split, part = _opened(first, data, options)
    split.subsample(options.corruption_images or None)
    for other in others:
        if other.model.class_names != first.model.class_names:
            raise CandidError(
                f"'{first.path}' and '{other.path}' have different classes: audit them separately."
            )
        if _opened(other, data, options)[0].fingerprint() != split.fingerprint():
            raise CandidError(
                f"'{first.path}' and '{other.path}' have different test images of '{data}': audit them "
                "separately."
            )
    if part in options.others:
        raise CandidError(f"The name '{part}' is taken by the test images: choose another name for --ood.")
    for spec in options.others.values():
        open_images(spec, first.model.preprocessing).subsample(options.images)
    return split.can_index


def _opened(model: AuditedModel, data: str, options: AuditOptions) -> tuple[Split, str]:
    chosen = open_part(data, model.model.class_names, options.part, model.model.record.config)
    return chosen.split.subsample(options.images), chosen.part
