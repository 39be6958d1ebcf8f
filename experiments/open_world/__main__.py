"""Measure teaching and grouping on folders of photos.

``python -m experiments.open_world teach DATA_FOLDER --out runs/open-world/teach.json``
``python -m experiments.open_world bounds DATA_FOLDER --out runs/open-world/bounds.json``
``python -m experiments.open_world group DATA_FOLDER --out runs/open-world/group.json``

``DATA_FOLDER`` is as for ``experiments.photos``. The features of the photos are computed once and stored in
``runs/open-world``. Tables are printed in Markdown; ``--out`` gets all figures as JSON.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from candid._support.files import write_texts
from candid.models.photo.efficientnet import PackagedEye
from candid.models.photo.eyes import EYES
from experiments.open_world import bounds, grouping, teaching
from experiments.photo_sets import FAR, Reader

STUDIES: dict[str, ModuleType] = {"teach": teaching, "bounds": bounds, "group": grouping}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m experiments.open_world", description=__doc__)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("data", metavar="DATA_FOLDER", type=Path, help="the folder of the photo sets")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/open-world"), help="where features are stored"
    )
    asked = parser.parse_args(arguments)
    study = STUDIES[asked.study]
    reader = Reader(PackagedEye(EYES["lite0"]), asked.work)
    sets, (far, _) = reader.sets(asked.data), reader.read(asked.data / FAR)
    results = study.measured(sets, far, reader.eye)
    if asked.out is not None:
        write_texts({asked.out.name: json.dumps(results, indent=1) + "\n"}, asked.out.parent)
    print(study.tables(results))


if __name__ == "__main__":
    main()
