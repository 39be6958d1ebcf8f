"""What a model is worth on data: one pass over a split, and pure functions of it."""

from candid.evaluation.metrics import accuracy, bits_per_dimension, cross_entropy, expected_calibration_error
from candid.evaluation.ood import p_values, typicality_p_values
from candid.evaluation.predictions import Predictions, predict_batches

__all__ = [
    "Predictions",
    "accuracy",
    "bits_per_dimension",
    "cross_entropy",
    "expected_calibration_error",
    "p_values",
    "predict_batches",
    "typicality_p_values",
]
