"""p-values and verdicts depend on no batch, order or form: a short version of an attack of ``make red``."""

from pathlib import Path

import pytest

from experiments.red.batches import as_arrays, different, exported, in_python
from tests.photo_models import PhotoRun


@pytest.fixture(scope="module")
def paths(photo_run: PhotoRun) -> list[Path]:
    held_out = sorted(Path(photo_run.data, "train").rglob("*.png"))[::4]
    return [
        *held_out,
        *sorted(Path(photo_run.data, "test").rglob("*.png"))[::2],
        *photo_run.strange.rglob("*.png"),
    ]


def test_p_values_and_verdicts_are_the_same_in_all_ways(
    photo_run: PhotoRun, paths: list[Path], tmp_path: Path
) -> None:
    expected = in_python(photo_run.model, paths, len(paths))
    assert len({each.p_value for each in expected}) > 5
    for found in (
        in_python(photo_run.model, paths[::-1], len(paths))[::-1],
        in_python(photo_run.model, paths, 1),
        in_python(photo_run.model, paths, 7),
        as_arrays(photo_run.model, paths),
        exported(photo_run.model, paths, tmp_path),
    ):
        assert not different(expected, found)


def test_a_difference_of_one_rank_is_noticed(photo_run: PhotoRun, paths: list[Path]) -> None:
    expected = in_python(photo_run.model, paths[:2], 2)
    assert (
        len(different(expected, [expected[0], expected[1]._replace(p_value=expected[1].p_value + 0.02)])) == 1
    )
