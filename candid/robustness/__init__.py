"""What a classifier does when images get worse, by accident or on purpose."""

from candid.robustness.attack import Attack, carlini_wagner, projected_gradient
from candid.robustness.corruptions import CORRUPTIONS, SEVERITIES, Corruption, corrupt

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "Attack",
    "Corruption",
    "carlini_wagner",
    "corrupt",
    "projected_gradient",
]
