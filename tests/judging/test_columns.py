"""Tables of examinations: columns, data frames of libraries that are installed, a sentence for others."""

import importlib.util
from typing import Any

import pytest

import candid
from candid import CandidError, Examination
from candid.judging.table_files import COLUMNS, LIBRARIES

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
