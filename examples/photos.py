"""A classifier of your own photos, in one call; then verdicts on photos that it has never seen.

    python examples/photos.py

A folder of photos per class is all it takes. Here they are sample photos of clothes that come with Candid:
30 of each kind train the model, 20 are new to it, and so are hats, a kind that is in no class.
"""

import shutil
import tempfile
from collections import Counter
from importlib.resources import files
from pathlib import Path

import candid

SAMPLES = Path(str(files("candid.reports.demo"))) / "samples"

with tempfile.TemporaryDirectory() as work:
    photos, new, model = (Path(work) / name for name in ("photos", "new", "model"))
    for photo in SAMPLES.glob("clothes/*/[0-4]*.jpg"):
        place = (photos if int(photo.stem) < 30 else new) / photo.parent.name / photo.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photo, place)

    candid.train(str(photos), out=model)
    judged = {
        "new clothes": candid.examine(model, str(new / "*/*.jpg")),
        "hats": candid.examine(model, str(SAMPLES / "hats")),
    }

print(f"{'photos':<12} {'accept':>7} {'ambiguous':>10} {'novel':>6} {'accepted and right':>19}")
for name, examinations in judged.items():
    verdicts = Counter(examined.verdict for examined in examinations)
    right = sum(
        examined.verdict == "accept" and examined.label == Path(examined.path).parent.name
        for examined in examinations
    )
    row = f"{verdicts['accept']:>7} {verdicts['ambiguous']:>10} {verdicts['novel']:>6} {right:>19}"
    print(f"{name:<12} {row}")
