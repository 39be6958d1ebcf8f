"""Tables of examinations: columns, data frames of libraries that are installed, and files."""

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import candid
from candid import CandidError, Examination
from candid.judging.examine import image_paths
from candid.judging.table_files import COLUMNS, CSV_COLUMNS, LIBRARIES, TableFile
from tests.helpers import candid_command
from tests.photo_models import PhotoRun, photo

FOUND: list[Any] = [
    Examination("a.png", {"cat": 0.9, "dog": 0.1}, 0.4, 0.5, "accept", ("cat",)),
    Examination("b.png", {"dog": 0.6, "cat": 0.4}, 0.3, None, "ambiguous", ("dog", "cat"), "pet", 2),
    candid.UnusableImage("c.png", "it is cut"),
    Examination("d.png", {"dog": 0.6, "cat": 0.4}, 0.01, None, "novel", ()),
    Examination("e.png", {"dog": 1.0}),
]


def test_a_table_has_what_the_record_of_an_image_has() -> None:
    table = candid.table(iter(FOUND))
    assert tuple(table) == COLUMNS and repr(table).startswith("Table of 5 images: path, label")
    assert table["path"] == ["a.png", "b.png", "c.png", "d.png", "e.png"]
    assert table["verdict"] == ["accept", "ambiguous", None, "novel", None]
    assert table["label"][2] is None and table["error"] == [None, None, "it is cut", None, None]
    for row, examined in enumerate(FOUND):
        if isinstance(examined, Examination):
            record = examined.to_dict()
            assert all(table[name][row] == record[name] for name in COLUMNS if name in record)
            top = dict(zip(table["top_classes"][row], table["top_posteriors"][row], strict=True))
            assert top == record["posterior"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("found", [FOUND, []], ids=["some", "none"])
def test_a_frame_or_one_sentence(library: str, found: list[Any]) -> None:
    """The frames of libraries that are not installed here are tested by ``make check``."""
    table = candid.table(found)
    convert = getattr(table, f"to_{library.removeprefix('py')}")
    if importlib.util.find_spec(library) is None:
        with pytest.raises(CandidError, match=f"needs the package {library}: install it"):
            convert()
        return
    frame = convert()
    assert list(frame.column_names if library == "pyarrow" else frame.columns) == list(COLUMNS)
    assert len(frame) == len(found)
    column = frame["classes"]
    values = column.to_pylist() if library == "pyarrow" else list(column)
    assert [None if value is None else list(value) for value in values] == table["classes"]


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
