"""What the paper reports on ImageNet, by beta or ``ResNet``."""

from experiments.robustness import PAPER_AREAS

TABLE_2 = {
    "1": (-1.90, 8.52, 4.34, 67.30, 3.87),
    "2": (-0.65, 8.26, 6.14, 71.73, 4.13),
    "4": (1.14, 8.14, 8.72, 73.69, 4.31),
    "8": (3.66, 8.10, 12.35, 74.59, 4.73),
    "16": (7.17, 8.06, 17.43, 75.54, 4.15),
    "32": (10.81, 8.01, 22.68, 76.18, 4.94),
    "∞": (27.68, 7.99, 47.01, 76.27, 5.12),
    "0": (-3.11, None, 2.59, None, None),
    "ResNet": (None, 7.87, None, 77.40, 6.75),
}
"""L_X, L_Y, bits/dim, top-1 accuracy of ten crops (%), OCE."""
CALIBRATION = {
    "1": (0.16, 5.54, 3.87),
    "2": (0.16, 3.13, 4.13),
    "4": (0.16, 5.47, 4.31),
    "8": (0.17, 4.57, 4.73),
    "16": (0.16, 5.50, 4.15),
    "32": (0.17, 5.28, 4.94),
    "∞": (0.17, 5.10, 5.12),
    "ResNet": (0.17, 7.72, 6.75),
}
"""ECE (%), MCE (%), OCE."""
CORRUPTIONS = {
    "0": (None, None, None, None, 77.51),
    "1": (32.7, 98.5, 116, 1.62, 75.6),
    "2": (28.27, 92.5, 119, 1.75, 73.6),
    "4": (26.31, 88.2, 117, 1.72, 70.84),
    "8": (25.41, 86.8, 117, 1.81, 65.85),
    "16": (24.46, 84.9, 115, 1.79, 62.43),
    "32": (23.82, 83.1, 113, 1.71, 55.83),
    "∞": (23.73, 83.4, 114, 1.58, 44.24),
    "ResNet": (22.6, 78.2, 109, 1.51, None),
}
"""Clean error (%), mCE (%), relative mCE (%), increase of the entropy, mean AUC (%).

The mean AUC at beta 1 is that of its fifteen areas; 67.9 is printed.
"""
AREAS = PAPER_AREAS | {
    "2": (94.8, 95.2, 98.5, 87.8, 82.6, 81.3, 84.9, 30.9, 43.2, 96.5, 44.1, 95.2, 56.6, 61.0, 51.2),
    "8": (89.3, 91.2, 94.6, 56.9, 63.5, 63.1, 73.7, 37.6, 46.6, 87.8, 45.1, 71.2, 53.1, 65.1, 49.1),
    "32": (81.6, 81.5, 84.0, 39.8, 51.6, 50.1, 54.8, 43.9, 44.3, 61.6, 44.6, 53.9, 52.4, 52.5, 41.1),
}
"""AUC of the two-tailed score (%), by corruption."""
BITS_OFFSET = 7.08
"""The paper prints L_X / ln 2 + this as bits/dim; the change of variables gives 7.174."""
CLASSES = 1000
TABBY, TIGER_CAT = 281, 282
"""The paper's example of similar classes, with an expected uncertainty of 20 %."""
GROUPS = {
    "cats": range(281, 294),
    "cars": (407, 436, 468, 511, 555, 569, 609, 627, 656, 661, 675, 717, 751, 817, 864, 867),
    "instruments": (401, 402, 420, 432, 486, 513, 546, 558, 566, 579, 594, 683, 776, 875, 881, 889),
}
"""Groups of similar classes in Figure 5, by class number; the text does not say which the paper shows."""
