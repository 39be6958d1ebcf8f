"""Verdicts: scores, detectors, held-out images, examinations."""
