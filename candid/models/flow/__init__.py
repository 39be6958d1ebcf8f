"""Invertible layers and the network built from them."""

from candid.models.flow.backbone import FlowConfig, build_flow
from candid.models.flow.coupling import (
    ActNorm,
    AffineCoupling,
    CoefficientScale,
    DownsamplingCoupling,
    OrthogonalMixing,
    Permutation,
    random_orthogonal,
)
from candid.models.flow.invertible import Chain, Invertible
from candid.models.flow.pooling import DCTPooling, HaarPooling, dct_matrix

__all__ = [
    "ActNorm",
    "AffineCoupling",
    "Chain",
    "CoefficientScale",
    "DCTPooling",
    "DownsamplingCoupling",
    "FlowConfig",
    "HaarPooling",
    "Invertible",
    "OrthogonalMixing",
    "Permutation",
    "build_flow",
    "dct_matrix",
    "random_orthogonal",
]
