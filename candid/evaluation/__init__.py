"""What a model is worth on data: one pass over a split, and pure functions of it."""

from candid.evaluation.calibration import (
    Bins,
    Interval,
    all_bins,
    calibration_figures,
    expected_calibration_error,
    fit_temperature,
    maximum_calibration_error,
    mean_interval,
    overconfidence_error,
    share_interval,
    top_bins,
)
from candid.evaluation.density import DensityOfStates, TypicalSet
from candid.evaluation.metrics import accuracy, bits_per_dimension, cross_entropy, top_k_accuracy
from candid.evaluation.ood import Detector, OneTailed, PerClass, TwoTailed, Typicality, p_values, waic
from candid.evaluation.predictions import Predictions, predict_batches
from candid.evaluation.roc import (
    Roc,
    area_under_curve,
    detection_figures,
    false_positive_rate_at,
    roc_curve,
)
from candid.evaluation.verdict import Verdict, class_sets, verdicts

__all__ = [
    "Bins",
    "DensityOfStates",
    "Detector",
    "Interval",
    "OneTailed",
    "PerClass",
    "Predictions",
    "Roc",
    "TwoTailed",
    "TypicalSet",
    "Typicality",
    "Verdict",
    "accuracy",
    "all_bins",
    "area_under_curve",
    "bits_per_dimension",
    "calibration_figures",
    "class_sets",
    "cross_entropy",
    "detection_figures",
    "expected_calibration_error",
    "false_positive_rate_at",
    "fit_temperature",
    "maximum_calibration_error",
    "mean_interval",
    "overconfidence_error",
    "p_values",
    "predict_batches",
    "roc_curve",
    "share_interval",
    "top_bins",
    "top_k_accuracy",
    "verdicts",
    "waic",
]
