"""How many images are held out if there are few, and the groups that a table gives to images."""

from pathlib import Path

import pytest

from candid._support.errors import CandidError
from candid.data.datasets import held_out_share
from candid.data.groups import GroupTable


def write(folder: Path, *counts: int) -> None:
    """Write files that are named like images: nothing here opens them."""
    for name, count in zip(("cat", "dog", "owl"), counts, strict=False):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            (folder / name / f"{i}.png").touch()


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((250, 250), 0.05, 0.25),
        ((60, 60, 60), 0.02, 0.3),
        ((20, 20, 20), 0.02, 0.5),
        ((60, 60, 60), 0.6, 0.6),
    ],
)
def test_of_few_images_more_are_held_out(
    tmp_path: Path, counts: tuple[int, ...], share: float, expected: float
) -> None:
    write(tmp_path, *counts)
    assert held_out_share(str(tmp_path), share) == pytest.approx(expected)


def test_a_folder_with_own_parts_keeps_them(tmp_path: Path) -> None:
    write(tmp_path / "train", 60, 60)
    write(tmp_path / "test", 9, 9)
    assert held_out_share(str(tmp_path), 0.02) == pytest.approx(0.3)
    write(tmp_path / "val", 3, 3)
    assert held_out_share(str(tmp_path), 0.02) == 0.02


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "photos.csv"
    file.write_text("\ufeffpath,site,camera\na.png,north,1\nnew/a.png,south,2\n./old\\b.png,,1\n", "utf-8")
    return file


def test_an_image_belongs_to_the_row_that_its_path_ends_with(table: Path) -> None:
    found = GroupTable.read(f"{table}:site")
    assert found is not None
    assert found.of(["/data/new/a.png", "a.png", "x/a.png", "old/b.png"]) == ["south", "north", "north", ""]
    assert found.of(["c.png", "new/a.png"], needed=False) == ["", "south"]
    with pytest.raises(CandidError, match=r"has no row for 'c.png' and 1 more images: add what is missing"):
        found.of(["a.png", "c.png", "d.png"])


@pytest.mark.parametrize("by", [None, "class", "site", "notes.txt:site"])
def test_other_groups_are_no_tables(by: str | None) -> None:
    assert GroupTable.read(by) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "has no rows"),
        (b"file,site\na.png,x\n", "has no column 'path'"),
        (b"path,sites\na.png,x\n", "has no column 'site': did you mean 'sites'?"),
        (b"path,site\na.png,x\na.png,y\n", "has 'a.png' in two groups"),
        (b"path,site\n\xff\xfe,x\n", "can't be read"),
        (None, "can't be read"),
    ],
)
def test_bad_tables_give_one_sentence(tmp_path: Path, text: bytes | None, said: str) -> None:
    if text is not None:
        (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(CandidError) as refused:
        GroupTable.read(f"{tmp_path / 't.csv'}:site")
    assert said in str(refused.value)
