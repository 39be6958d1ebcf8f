"""A softmax classifier that you already have says when not to trust it; its posteriors stay as they are.

    python examples/adopt.py [PHOTOS NEW]

The classifier is EfficientNet-Lite0 with the 1000 classes of ImageNet; an ONNX file of yours works the same
way. PHOTOS are ordinary photos of your camera, NEW are photos to judge.
"""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import candid

SAMPLES = Path(str(files("candid.reports.demo"))) / "samples"
photos, new = sys.argv[1:] or (SAMPLES / "clothes" / "shoes", SAMPLES / "everyday")

with tempfile.TemporaryDirectory() as folder:
    candid.adopt("lite0", str(photos), out=folder)
    judged = candid.examine(folder, str(new))

print(f"{'photo':<14} {'class':<20} {'posterior':>9} {'p-value':>8}  verdict")
for examined in judged:
    posterior, p_value = f"{examined.confidence:.1%}", f"{examined.p_value:.3f}"
    label = examined.label.split(",")[0]
    print(f"{Path(examined.path).name:<14} {label:<20} {posterior:>9} {p_value:>8}  {examined.verdict}")
