"""Tables of judged images, and images sorted into folders of their verdicts."""

import csv
import json
from pathlib import Path

import pytest

from candid import CandidError
from candid.judging.examine import image_paths
from candid.judging.table_files import CSV_COLUMNS, TableFile
from tests.helpers import candid_command
from tests.photo_models import PhotoRun, photo


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "new"
    folder.mkdir()
    for i in (1, 2, 10):
        photo("dots", 800 + i).save(folder / f"dots {i}.png")
    (folder / "=bad.png").write_bytes(b"no photo")
    return folder


def test_tables_have_a_row_for_each_image_and_promises_once(
    photo_run: PhotoRun, photos: Path, tmp_path: Path
) -> None:
    done = candid_command("examine", photo_run.model, photos, "--out", tmp_path / "t.csv")
    assert done.exit_code == 2  # one image can't be used
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [Path(row["path"]).name for row in rows] == ["=bad.png", "dots 1.png", "dots 2.png", "dots 10.png"]
    assert "not an image" in rows[0]["error"] and rows[1]["verdict"] in ("accept", "ambiguous", "novel")
    promises = json.loads((tmp_path / "t.promises.json").read_text())
    assert promises["plain"] and "promises" not in (tmp_path / "t.csv").read_text()
    candid_command("examine", photo_run.model, photos, "--out", tmp_path / "t.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [line.get("verdict", "") for line in lines] == [row["verdict"] for row in rows]
    assert "promises" not in lines[1] and lines[1]["posterior"]
    with pytest.raises(CandidError, match="ends with .csv, .jsonl, .parquet"):
        TableFile(tmp_path / "t.xlsx")


def test_images_are_sorted_into_folders(photo_run: PhotoRun, photos: Path, tmp_path: Path) -> None:
    arguments = "examine", photo_run.model, photos, "--sort-into", tmp_path / "sorted"
    candid_command(*arguments)
    copied = sorted(path.name for path in (tmp_path / "sorted").rglob("*.png"))
    assert copied == ["dots 1.png", "dots 10.png", "dots 2.png"]
    assert {
        path.parts[-len(path.relative_to(tmp_path / "sorted").parts)]
        for path in (tmp_path / "sorted").rglob("*.png")
    } <= {"accepted", "ambiguous", "novel"}
    again = candid_command("examine", photo_run.model, tmp_path / "sorted", *arguments[3:])
    assert "copies that an earlier run made" in str(again.exception)


def test_names_come_in_the_order_of_their_numbers(photos: Path) -> None:
    names = [path.name for path in image_paths([str(photos)])]
    assert names == ["=bad.png", "dots 1.png", "dots 2.png", "dots 10.png"]
    assert [path.name for path in image_paths([f"{photos}/dots*.png"])] == names[1:]
