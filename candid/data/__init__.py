"""Data sets from one string, and batches of them."""

from typing import Literal

Part = Literal["train", "val", "test", "all"]
Crop = Literal["none", "shift", "jitter", "resized"]
SplitRule = Literal["hash", "shuffled"]
SYNTHETIC = ("uniform-noise", "constant")
"""Images that are made here and need no files."""
PHOTO_SIDE = 96
"""Images with at least this many pixels per side are photos: they get an eye, and come in all sizes."""
FEATURES_FILE = ".npz"
"""The ending of a file with features."""
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".parquet")
"""Endings of files with many images."""
