"""Verdicts of an exported photo model, without Candid: numpy, Pillow and onnxruntime.

    candid export waste --out model.onnx        # writes model.onnx and model.json
    python verdict.py model.onnx photo.jpg ...

The JSON file has held-out scores and levels; ``seen`` prepares RGB photos as Candid does.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

ROUNDING, TOLERANCE, MASS_ROUNDING = 1e-5, 1e-9, 1e-12
LISTED, NAMED = 3, 150  # more classes than LISTED become a kind of them, which has a name up to NAMED


class Verdicts:
    """What turns ``logits`` and ``novelty`` of the network into verdicts: the JSON file next to it."""

    def __init__(self, path):
        self.known = json.loads(Path(path).read_text(encoding="utf-8"))
        self.names = self.known["class_names"]
        self.held_out = np.array(self.known["held_out_novelty"], np.float64)
        first = self.known["first_of_copies"]
        self.among = [self.held_out] + ([] if first is None else [self.held_out[np.array(first, bool)]])
        self.ratios = np.full(len(self.names), min(self.known["smallest_ratio"], 1.0))
        for y, bound in self.known["smallest_ratios"].items():
            self.ratios[int(y)] = min(bound, 1.0)
        self.tree = self.known["tree"]
        self.paths = None if self.tree is None else [self._path(kind) for kind in self.tree["class_parents"]]

    def _path(self, kind):
        """Return the kinds from the root down to this one."""
        parent = self.tree["parents"][kind]
        return [kind] if parent < 0 else [*self._path(parent), kind]

    def p_value(self, novelty):
        """Return the share of images that are as unusual as one with these scores (J,)."""
        novelty = np.asarray(novelty, np.float64)
        novelty = novelty - ROUNDING * np.maximum(1, np.abs(novelty))  # rounding counts as equal
        return max(self._rank(held_out, novelty) for held_out in self.among)

    def _rank(self, held_out, novelty):
        n, pairs = len(held_out), [*zip(held_out.T, novelty, strict=True)]
        own = [(1 + (column >= score).sum()) / (n + 1) for column, score in pairs]
        ranks = [(n - np.searchsorted(np.sort(v), v) + (score >= v)) / (n + 1) for v, score in pairs]
        combined = self._terms(np.array(ranks)).sum(0)
        return (1 + (combined >= self._terms(np.array(own)).sum() - TOLERANCE).sum()) / (n + 1)

    def _terms(self, p):
        return np.tan(np.pi * (0.5 - np.minimum(p, self.known["clip"])))

    def named(self, posterior):
        """Return which classes the answer names, from posteriors (M,)."""
        falling = np.sort(posterior)[::-1]
        count = int((falling.cumsum() < self.known["confidence"] - MASS_ROUNDING).sum())
        named = posterior / falling[0] >= self.ratios
        if falling[0] < self.known["confidence"]:
            named |= posterior >= falling[min(count, len(falling) - 1)]
        return np.flatnonzero(named)

    def verdict(self, logits, novelty):
        """Return verdict, classes (the most probable first), kind, posterior and p-value of one image."""
        posterior = np.exp(np.asarray(logits, np.float64) - np.max(logits))
        posterior /= posterior.sum()
        p = self.p_value(novelty)
        if p <= self.known["novelty"]:
            return "novel", [], None, posterior, p
        classes, kind = self.named(posterior), None
        verdict = "accept" if len(classes) == 1 else "ambiguous"
        if self.tree is not None and len(classes) > LISTED:
            above = [self.paths[y] for y in classes]
            shared = [kinds[0] for kinds in zip(*above, strict=False) if len(set(kinds)) == 1]
            classes = np.array([y for y, path in enumerate(self.paths) if shared[-1] in path])
            if len(shared) > 1 and len(classes) <= NAMED:
                kind = self.tree["names"][shared[-1]]
        order = classes[np.argsort(-posterior[classes], kind="stable")]
        return verdict, [self.names[y] for y in order], kind, posterior, p


def seen(path, size, margin):
    """Return a photo as the network takes it, (3, size, size) in [0, 1]: its centre, resized."""
    from PIL import Image, ImageOps

    image = Image.open(path)
    width, height = image.size
    surplus = min(width, height) / size / (1.0 if (width, height) == (size, size) else margin)
    least = (math.ceil(width / surplus), math.ceil(height / surplus))
    drafted = image.draft(None, least) if image.format == "JPEG" and surplus >= 2 else None
    scale = 1.0 if drafted is None else drafted[1][2] / width
    turned = image.getexif().get(274, 1)  # orientation: sides swapped, mirrored, upside down
    width, height = (height, width) if turned >= 5 else (width, height)
    image = ImageOps.exif_transpose(image).convert("RGB")
    x = image.size[0] - width * scale if turned in (2, 3, 6, 7) else 0
    y = image.size[1] - height * scale if turned in (3, 4, 7, 8) else 0
    left, top = (width - surplus * size) / 2 * scale + x, (height - surplus * size) / 2 * scale + y
    box = (left, top, left + surplus * size * scale, top + surplus * size * scale)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return np.moveaxis(np.asarray(image, np.float32) / np.float32(255), -1, 0)


def main():
    """Print a line for each photo."""
    import onnxruntime

    network, *photos = sys.argv[1:]
    session, verdicts = onnxruntime.InferenceSession(network), Verdicts(Path(network).with_suffix(".json"))
    size, margin = session.get_inputs()[0].shape[-1], verdicts.known["margin"]
    for photo in photos:
        logits, novelty = session.run(["logits", "novelty"], {"images": seen(photo, size, margin)[None]})
        verdict, classes, kind, posterior, p = verdicts.verdict(logits[0], novelty[0])
        print(f"{photo}: {verdict}, {kind or ', '.join(classes[:3])}, {posterior.max():.3f}, p = {p:.3f}")


if __name__ == "__main__":
    main()
