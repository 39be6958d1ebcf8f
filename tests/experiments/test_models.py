"""Data of the bundled models: a folder with test photos, CIFAR-10 as image files."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from candid import CandidError
from candid.data.formats import read_cifar
from experiments.models import with_test
from experiments.results import as_images, merged
from tests.data.test_formats import write_binary_cifar


def test_val_takes_the_place_of_test(tmp_path: Path) -> None:
    data, work = tmp_path / "tiny20", tmp_path / "work"
    (data / "train").mkdir(parents=True)
    with pytest.raises(CandidError, match=r"needs the folders train/ and test/ \(or val/\)"):
        with_test(data, work)
    for part in ("train", "val"):
        (data / part / "cat").mkdir(parents=True)
        (data / part / "cat" / f"{part}.png").touch()
    for _ in range(2):  # links of an earlier run stay
        linked = with_test(str(data), work)
        assert linked.name == "tiny20" and {path.name for path in linked.iterdir()} == {"train", "test"}
        assert (linked / "test" / "cat" / "val.png").is_file()
        assert (linked / "train" / "cat" / "train.png").is_file()
    (data / "test").mkdir()
    assert with_test(data, work) == data


def test_published_test_images_become_files_with_the_same_pixels(tmp_path: Path) -> None:
    published = tmp_path / "batches"
    published.mkdir()
    write_binary_cifar(published)
    folder = Path(as_images(str(published), tmp_path / "work"))
    splits, names = read_cifar(published)
    test = splits["test"]
    files = sorted(folder.glob("test/*/*.png"), key=lambda path: path.name)
    assert len(files) == len(test.labels)
    for file, pixels, y in zip(files, test.images, test.labels, strict=True):
        assert file.parent.name == names[y]
        assert np.array_equal(np.asarray(Image.open(file)).transpose(2, 0, 1), pixels)
    assert as_images(str(published), tmp_path / "work") == str(folder)
    assert as_images(str(folder), tmp_path / "elsewhere") == str(folder)


def test_records_of_models_that_are_measured_again_replace_the_earlier_ones() -> None:
    names = ["beta4", "beta8", "beta16"]
    earlier = [{"model": name, "d": d, "new": False} for name in ("beta16", "gone", "beta4") for d in (0, 66)]
    found = [{"model": name, "d": d, "new": True} for name in ("beta16", "beta8") for d in (0, 66, 1000)]
    records = merged(names, earlier, found)
    assert [(each["model"], each["d"], each["new"]) for each in records] == [
        *(("beta4", d, False) for d in (0, 66)),
        *((name, d, True) for name in ("beta8", "beta16") for d in (0, 66, 1000)),
    ]
    assert merged(names, earlier, []) == [*earlier[4:], *earlier[:2]]
