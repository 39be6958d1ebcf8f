from pathlib import Path

import pytest

import candid
from candid import CandidError
from candid.data.groups import GroupTable
from candid.judging.calibrate import held_out_groups
from candid.judging.held_out import HeldOut
from tests.photo_models import CLASSES, PhotoRun, write_photos


def test_photos_out_of_fold_have_groups(photo_run: PhotoRun, tmp_path: Path) -> None:
    """They are training photos, whatever part of the data they are in."""
    model = candid.load(photo_run.model)
    held_out = HeldOut.of(model)
    assert held_out is not None and held_out.out_of_fold
    paths = sorted((Path(photo_run.data) / "train").rglob("*.png"))
    sites = {path: "ns"[i % 2] for i, path in enumerate(paths)}
    file = tmp_path / "photos.csv"
    file.write_text("\n".join(["path,site", *(f"{path},{site}" for path, site in sites.items())]))
    table = GroupTable.read(f"{file}:site")
    assert table is not None
    found = held_out_groups(table, model, photo_run.data, held_out)
    assert sorted(found) == sorted(sites.values())
    others = write_photos(tmp_path / "others", CLASSES, 4, start=500)
    with pytest.raises(CandidError, match="36 held-out images are not in .*the data that it was trained on"):
        held_out_groups(table, model, str(others), held_out)
