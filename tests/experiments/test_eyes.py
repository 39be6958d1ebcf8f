"""The table of eyes from elsewhere: a line says what was trained, and how far heatmaps are from adding up."""

from pathlib import Path

import pytest

from experiments.eyes import chosen, row
from tests.models.photo.test_hub import KINDS, hub_folder
from tests.photo_models import CLASSES, write_photos


@pytest.mark.parametrize("name", ["siglip", "mobileclip"])
def test_a_line_of_the_table(name: str, tmp_path: Path) -> None:
    photos = chosen(write_photos(tmp_path / "data", CLASSES, 10), 18, tmp_path / "chosen")
    graph = hub_folder(tmp_path / "graph", KINDS[name])
    numbers, judged, tested, right, added = row(str(graph), photos, tmp_path / "run")
    assert (numbers, judged) == (6 if name == "mobileclip" else 18, 18)
    assert 0 < tested < 18 and right.endswith("%")
    if name == "mobileclip":  # it has no maps
        assert added == "no heatmaps"
    else:
        assert float(added.removeprefix("to ")) < 1e-6
