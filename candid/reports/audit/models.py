"""A model under audit."""

import re
from dataclasses import dataclass
from pathlib import Path

from candid.models.protocol import Model


@dataclass(frozen=True)
class AuditedModel:
    """A model under audit, loaded once for all studies."""

    name: str
    path: Path
    model: Model
    beta: float | None
    held_out: int
    """Number of held-out images behind its p-values; 0 if it was never calibrated."""

    @property
    def is_generative(self) -> bool:
        """Whether it has a likelihood and class means in latent space."""
        return self.model.density_of is not None

    @property
    def folder(self) -> str:
        """The name of its folders."""
        return re.sub(r"[^\w.-]+", "-", self.name).strip(".-") or "model"

    @property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(each.numel() for each in self.model.parameters())
