"""Store what a plain linear classifier says, on the same eye as a photo model: arrays for an audit.

``python -m experiments.linear_probe MODEL DATA --other NAME=FOLDER --out linear``

It is logistic regression on the pooled features of the eye, fitted to the ``train`` photos of ``DATA``.
``val.npz``, ``test.npz`` and ``NAME.npz`` have logits, labels, paths and class names: logits alone, as such a
classifier is mostly used. ``--features`` adds the features, so that verdicts may use them, too.
``candid audit MODEL --data DATA --held-out linear/val.npz --test linear/test.npz`` shows both.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import candid
from candid._support.numbers import Array
from candid._support.text import named_pairs
from candid.data.batches import named_batches
from candid.data.datasets import open_images, open_part
from candid.data.images import to_float
from candid.data.splits import Split
from experiments.photos import Logistic


def pooled(model: Any, split: Split) -> tuple[Array, Array, tuple[str, ...]]:
    """Return the pooled features of photos (N, P), their labels (N,) and their files."""
    ready = split.preprocess(model.preprocessing)
    features, labels = [], []
    names: list[str] = []
    for images, of_batch, paths in named_batches(ready, model.preprocessing, 32):
        features.append(model.eye.statistics_and_pooled(to_float(images))[1])
        labels.append(of_batch)
        names += paths
    return np.concatenate(features), np.concatenate(labels), tuple(names)


def main() -> None:
    """Fit, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--images", type=int, help="of each other set, as candid audit --images takes them")
    parser.add_argument("--features", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("linear"))
    given = parser.parse_args()
    model: Any = candid.load(given.model)
    parts = {
        part: pooled(model, open_part(given.data, model.class_names, part).split)
        for part in ("train", "val", "test")
    }
    features, labels, _ = parts.pop("train")
    classifier = Logistic(features, labels, (features.shape[1],))
    for name, folder in named_pairs(given.other, "--other").items():
        parts[name] = pooled(model, open_images(folder, model.preprocessing).subsample(given.images))
    given.out.mkdir(parents=True, exist_ok=True)
    for name, (features, labels, paths) in parts.items():
        arrays: dict[str, Any] = {
            "logits": classifier.logits(features),
            "labels": labels,
            "paths": np.array(paths),
        }
        arrays |= {"features": features} if given.features else {}
        np.savez(given.out / f"{name}.npz", class_names=np.array(model.class_names), **arrays)
    print(f"penalty {classifier.penalty:g}; written to {given.out}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
