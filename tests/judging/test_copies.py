"""Copies among held-out images count once: where scores learn, and in every p-value."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import candid
from candid import CandidError
from candid._support.numbers import Array
from candid.data.groups import GroupTable
from candid.data.splits import ArraySplit, FileSplit
from candid.inference.predictions import Predictions
from candid.judging.calibrate import held_out_scores, in_named_series, scored
from candid.judging.detection import GROUPS, Detection
from candid.judging.held_out import HeldOut
from candid.judging.watched import WatchedScore
from candid.models.checkpoint import load
from candid.training.adopt import _copies
from candid.trust.arrays import firsts, fixed_halves
from candid.trust.promises import Levels
from candid.trust.ranking import ALL
from candid.trust.scores import Columns
from tests.helpers import RecordedProgress

CLASSES, WIDTH = 4, 64


def images(n: int, times: int = 1, seed: int = 0) -> Predictions:
    """Predictions for n images, each there several times; a class lies around its axis."""
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=n)
    features = random.normal(size=(n, WIDTH)) + 3 * np.eye(WIDTH)[labels]
    columns: dict[str, Array] = {"features": features.astype(np.float32)}
    columns["keys"] = random.integers(2**60, size=n)
    logits = (2 * features[:, :CLASSES]).astype(np.float32)
    priors = np.full(CLASSES, -math.log(CLASSES))
    predictions = Predictions(("",) * n, labels, logits, priors, columns)
    return predictions[np.tile(np.arange(n), times)]


@pytest.fixture(scope="module")
def held_out() -> HeldOut:
    """What a model without training images knows of 300 images, each there five times."""
    return held_out_scores(images(300, times=5))


def new_columns(held_out: HeldOut, n: int = 1000) -> Columns:
    return scored(images(n, seed=1), held_out.learned).statistics


@pytest.mark.parametrize("score", ["mahalanobis", "mahalanobis++", "knn", "combined"])
def test_false_alarms_with_copies_stay_near_the_level(held_out: HeldOut, score: str) -> None:
    """They were 58 % at 5 % when copies of an image that a score learned from ranked it."""
    rule = held_out.rule(Levels(score=score, novelty=0.05))
    assert rule.promises[ALL].n_reference == 150
    assert (rule.p_values(new_columns(held_out)) <= 0.05).mean() < 0.12


def test_no_image_both_fits_a_score_and_ranks_it(held_out: HeldOut) -> None:
    fitted = held_out.fitted_keys
    assert fitted is not None and len(np.unique(fitted)) == len(np.unique(held_out.statistics["keys"])) == 150
    assert not np.isin(fitted, held_out.statistics["keys"]).any()
    named = images(120)
    columns = {**named.columns, "series": np.arange(120) // 2}
    series = held_out_scores(replace(named, columns=columns)).statistics["series"]
    assert len(series) == 60 and len(np.unique(series)) == 30


def test_named_series_count_once_and_none_is_trained_on(tmp_path: Path) -> None:
    table = tmp_path / "days.csv"
    table.write_text("path,day\n" + "".join(f"{i}.png,{i // 4}\n" for i in range(48)))
    found = replace(images(40), paths=tuple(f"{i}.png" for i in range(40)))
    progress = RecordedProgress()
    days = GroupTable.together(f"{table}:day")
    named = in_named_series(found, days, ["new/3.png", "44.png", "other.png"], progress)
    assert named.columns["series"].tolist() == [i // 4 - 1 for i in range(4, 40)]
    assert named.paths == found.paths[4:]
    assert progress.messages == [
        "4 held-out images are left out: their series is trained on",
        "36 held-out images in 9 series: each series counts once",
    ]
    promises = held_out_scores(named, images(40, seed=3)).rule().promises[ALL]
    assert promises.n_reference == 9 and promises.copies == 27
    with pytest.raises(CandidError, match="leaves 5 series of held-out images"):
        in_named_series(found[np.arange(20)], days, (), progress)
    with pytest.raises(CandidError, match=r"--together takes FILE.csv:COLUMN .*, not 'day'"):
        GroupTable.together("day")


def test_without_copies_halves_are_those_of_earlier_versions() -> None:
    first, second = fixed_halves(np.arange(9))
    assert sorted((*first, *second)) == list(range(9)) and len(first) == 4
    one = ArraySplit(np.zeros((5, 1, 2, 2), np.uint8), np.zeros(5, np.int64))
    assert _copies(one).tolist() == [0] * 5


def test_copies_of_files_are_on_one_side_of_an_adoption(tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{i}.png" for i in range(6))
    for i, file in enumerate(files):
        file.write_bytes(bytes([i % 2]))
    copies = _copies(FileSplit(files, np.zeros(6, np.int64)))
    assert len({*copies[::2]}) == len({*copies[1::2]}) == 1
    assert [len(half) for half in fixed_halves(copies)] == [3, 3]


def test_a_watch_sees_the_first_of_copies_only(held_out: HeldOut) -> None:
    model = load("cifar10-resnet")
    watches = [
        WatchedScore.fit(known, model, "energy").watch(model.class_names).to_json()
        for known in (held_out, held_out.rows(firsts(held_out.statistics["keys"])))
    ]
    assert watches[0] == watches[1]


def test_the_table_has_the_p_values_of_the_verdicts(held_out: HeldOut) -> None:
    new = new_columns(held_out)
    table = Detection(held_out.statistics, new, {}).p_values(new)
    for name in ("mahalanobis++", "energy", "combined", "max-posterior"):
        assert np.array_equal(table[name], held_out.rule(Levels(score=name)).p_values(new)), name
    groups = (new["predicted"] == 0).astype(np.int64)
    rule = held_out.rule(Levels(score="energy"), (held_out.statistics["predicted"] == 0).astype(np.int64))
    grouped = new.with_columns({GROUPS: groups})
    p = Detection(held_out.statistics, grouped, {}, rule).p_values(grouped)["energy"]
    examined = rule.examine(new, range(1000), tuple("abcd"), groups)
    assert p.tolist() == [each.p_value for each in examined] and not np.array_equal(p, table["energy"])


def test_one_copy_leaves_p_values_within_classes() -> None:
    held_out = held_out_scores(images(400), images(100, seed=2))
    copied = held_out.rows(np.append(np.arange(400), 0))
    new = scored(images(50, seed=1), held_out.learned).statistics
    within = [
        [each.class_p_value for each in known.rule().examine(new, range(50), tuple("abcd"))]
        for known in (held_out, copied)
    ]
    assert None not in within[1] and within[1] == pytest.approx(within[0], abs=0.03)


def test_monitors_count_copies_once_with_a_level_that_few_distinct_images_allow() -> None:
    some = images(30, times=5)
    monitor = candid.Monitor(novelty=0.01, score="energy").fit(some.logits, some.labels)
    assert monitor.promises.novelty.in_force == pytest.approx(1 / 31)
