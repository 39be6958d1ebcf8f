"""The world changes: an alarm rings, what is novel is taught as a new class, and the model knows it.

    python examples/open_world.py

A model of clothes watches a stream of clothes in which hats begin to appear. Hats are in no class.
"""

import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

import candid

SAMPLES = Path(str(files("candid.reports.demo"))) / "samples"
clothes, hats = sorted(SAMPLES.glob("clothes/*/*.jpg")), sorted(SAMPLES.glob("hats/*.jpg"))


def unusual(model, photos):
    """Return scores of photos that rise with outlyingness."""
    return [-examined.p_value for examined in candid.examine(model, list(map(str, photos)))]


def verdicts(model, photos):
    """Return accept, ambiguous or novel for each photo."""
    return [examined.verdict for examined in candid.examine(model, list(map(str, photos)))]


with tempfile.TemporaryDirectory() as folder:
    model, taught = str(Path(folder) / "model"), str(Path(folder) / "taught")
    for photo in clothes:
        place = Path(folder) / "photos" / photo.parent.name / photo.name
        if int(photo.stem) < 20:  # of each kind 20 train the model, 20 are held out, and 10 are the stream
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(photo, place)
    candid.train(str(Path(folder) / "photos"), out=model)

    held_out = [photo for photo in clothes if 20 <= int(photo.stem) < 40]
    stream = [photo for photo in clothes if int(photo.stem) >= 60]
    watch = candid.Watch(alarm=0.01).fit(unusual(model, held_out))
    quiet = watch.update(unusual(model, stream)).drift_detected
    rang = watch.update(unusual(model, hats)).drift_detected

    candid.teach(model, {"hat": [str(hat) for hat in hats[:20]]}, out=taught)
    before, after = (verdicts(each, hats[20:]) for each in (model, taught))

print(f"{'alarm after clothes, then after hats':<38} {quiet!s:>6} {rang!s:>6}")
print(f"{'hats called novel, before teaching':<38} {before.count('novel'):>6} of {len(before)}")
print(f"{'hats called novel, after teaching':<38} {after.count('novel'):>6} of {len(after)}")
