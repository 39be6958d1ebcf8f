"""Eyes from elsewhere: opened, trained on photos, asked, and whether their heatmaps add up.

python -m experiments.eyes trashnet6 --photos 200

The graphs have the signatures of the Hugging Face Hub, the networks the layouts of timm. All weights are
random, so accuracies say only that something is learned through them. With the folder of timm's own files in
CANDID_TIMM, its ten networks are used in place of the three stand-ins: see docs/photos.md.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import candid
from candid._support.errors import CandidError
from candid.data.formats import images_in, subfolders
from candid.data.images import preprocess_image, to_float
from candid.explanations.class_maps import class_maps
from candid.models.photo.opening import open_eye
from tests.models.photo.test_hub import KINDS, hub_folder
from tests.models.photo.timm_stand_in import REAL, STAND_INS, real, stand_in

ROW = "{:<40} {:>7} {:>7} {:>7} {:>7} {:>12}"


def main() -> None:
    """Print one line for each eye."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with a folder of photos for each class")
    parser.add_argument("--photos", type=int, default=200)
    arguments = parser.parse_args()
    sys.modules["timm"] = real() if "CANDID_TIMM" in os.environ else stand_in()
    networks = REAL if "CANDID_TIMM" in os.environ else STAND_INS[:3]
    print(ROW.format("eye", "numbers", "photos", "tested", "right", "maps add up"))
    with tempfile.TemporaryDirectory() as place:
        photos = chosen(arguments.data, arguments.photos, Path(place) / "photos")
        for name in networks:
            print(ROW.format(f"timm:{name}", *row(f"timm:{name}", photos, Path(place) / name)), flush=True)
        for name, kind in KINDS.items():
            graph = hub_folder(Path(place) / f"graph-{name}", kind)
            print(ROW.format(f"{name} (ONNX)", *row(str(graph), photos, Path(place) / name)), flush=True)


def chosen(data: Path, count: int, folder: Path) -> Path:
    """Link to about ``count`` photos, the same number of each class, spread over its files."""
    classes = subfolders(data)
    for each in classes:
        files = images_in(each)
        (folder / each.name).mkdir(parents=True)
        for file in files[:: max(1, len(files) * len(classes) // count)][: -(-count // len(classes))]:
            (folder / each.name / file.name).symlink_to(file.resolve())
    return folder


def row(eye: str, photos: Path, out: Path) -> tuple[Any, ...]:
    """Train through an eye and return a line of the table."""
    opened = open_eye(eye)
    candid.train(str(photos), out=out, eye=eye)
    model = candid.load(out)
    files = images_in(photos)
    judged = len(candid.examine(model, files))
    results = model.metadata.get("by_class", {"classes": []})["classes"]
    tested, right = (sum(each[key] for each in results) for key in ("images", "right"))
    errors = []
    for file in files[:: max(1, len(files) // 5)]:
        try:
            maps = class_maps(model, to_float(preprocess_image(Image.open(file), model.preprocessing)))
        except CandidError:  # no maps, only features
            break
        sums = maps.values.sum((1, 2))
        errors.append(max(maps.largest_error, np.abs(sums - (maps.scores - maps.baselines)).max()))
    added = f"to {max(errors):.0e}" if errors else "no heatmaps"
    return opened.dimensions, judged, tested, f"{right / max(1, tested):.0%}", added


if __name__ == "__main__":
    main()
