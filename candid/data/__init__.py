"""Data sets from one string, and batches of them."""

from candid.data.datasets import Dataset, open_dataset
from candid.data.images import BadImageError
from candid.data.loader import Plan, evaluation_batches, named_batches, training_batches
from candid.data.splits import ArraySplit, FileSplit, ShardSplit, View
from candid.data.transforms import ten_crops

__all__ = [
    "ArraySplit",
    "BadImageError",
    "Dataset",
    "FileSplit",
    "Plan",
    "ShardSplit",
    "View",
    "evaluation_batches",
    "named_batches",
    "open_dataset",
    "ten_crops",
    "training_batches",
]
