"""The alarm that images have changed: its level, its state, what it says."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

import candid
from candid import CandidError, Watch
from candid._support.numbers import digest
from candid._support.randomness import draws
from candid.judging.held_out import needed
from candid.judging.watch_images import WatchState
from candid.judging.watched import FIXING, WatchedScore
from candid.serve.sensor import Drift
from candid.trust.bets import (
    FrequencyBets,
    ScoreBets,
    bins_of,
    uniform,
)
from candid.trust.drift import CLASSES, SCORES
from candid.trust.scores import Columns
from experiments import drift
from tests.photo_models import CLASSES as CLASS_NAMES
from tests.photo_models import PhotoRun, write_photos

QUIET = np.random.default_rng(0).normal(size=4000)
FREQUENCIES = {"cat": 0.5, "dog": 0.3, "emu": 0.2}


def fitted(alarm: float = 0.01, n: int = 500) -> Watch:
    """A watch over scores, classes and confidence."""
    random = np.random.default_rng(1)
    classes = random.choice(3, n, p=list(FREQUENCIES.values()))
    return Watch(alarm).fit(random.normal(size=n), classes, FREQUENCIES, random.uniform(0.6, 1, n))


def test_the_watch_is_what_was_simulated() -> None:
    watch = fitted().update(
        QUIET[:300], np.arange(300) % 3, np.full(300, 0.8)
    )  # every class once in three images: a change
    random = np.random.default_rng(1)
    held_out = random.choice(3, 500, p=list(FREQUENCIES.values())), random.normal(size=500)
    streams = {CLASSES: np.arange(300) % 3, SCORES: bins_of(QUIET[:300])}
    for key, bets, known in (
        (CLASSES, FrequencyBets(list(FREQUENCIES.values())), held_out[0]),
        (SCORES, ScoreBets(), bins_of(held_out[1])),
    ):
        bins = np.unique(np.concatenate((known, streams[key])), return_inverse=True)[1][None]
        u = np.array([[uniform(0, key, t + 1) for t in range(300)]])
        path = drift.log_wealth(bets, drift.sequential(bins, 500, u))[0]
        found = watch._martingales[key]
        assert float(found.wealth.log) == pytest.approx(path[-1], abs=1e-9)
        assert found.peak == pytest.approx(max(path.max(), 0), abs=1e-9)


def test_one_at_a_time_is_the_same_as_many() -> None:
    many, single = (Watch().fit(QUIET[:200]) for _ in range(2))
    many.update(QUIET[200:260])
    for score in QUIET[200:260]:
        single.update(score)
    assert many.to_json() == single.to_json()
    assert Watch(seed=1).fit(QUIET[:200]).update(QUIET[200:260]).evidence != many.evidence


def test_a_saved_watch_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, part = fitted(), fitted()
    shift = (QUIET[:400] + 1, np.arange(400) % 3, np.full(400, 0.5), [f"{i}.png" for i in range(400)])
    whole.update(*shift)
    part.update(*(column[:150] for column in shift))
    part.save(tmp_path / "watch.json")
    again = Watch.load(tmp_path / "watch.json").update(*(column[150:] for column in shift))
    assert again.to_json() == whole.to_json()
    assert json.loads(json.dumps(again.report(), allow_nan=False)) == json.loads(json.dumps(whole.report()))
    assert [path.name for path in tmp_path.iterdir()] == ["watch.json"]


def test_the_state_has_a_constant_size() -> None:
    watch = Watch().fit(np.arange(200) % 17)
    sizes = [len(watch.update(np.arange(1000) % 17).to_json()) for _ in range(4)]
    assert sizes[-1] < sizes[0] + 50  # digits of the counts


@pytest.mark.parametrize(
    ("change", "direction"),
    [
        (lambda s, c, f: (s + 1.5, c, f), "more novel"),
        (lambda s, c, f: (s - 1.5, c, f), "less novel"),
        (lambda s, c, f: (s, np.full_like(c, 2), f), "other class frequencies: 'emu' more often"),
        (
            lambda s, c, f: (s, np.where(c == 0, 1 + (s > 0), c), f),
            "other class frequencies: 'cat' less often",
        ),
        (lambda s, c, f: (s + 1.5, c, f - 0.3), "less confident"),
    ],
)
def test_an_alarm_says_since_when_and_in_which_direction(change: Any, direction: str) -> None:
    random = np.random.default_rng(6)
    classes = random.choice(3, 700, p=list(FREQUENCIES.values()))
    confidence = random.uniform(0.6, 1, 700)
    watch = fitted()
    watch.update(QUIET[:400], classes[:400], confidence[:400])
    assert not watch.alarm and watch.after is None and watch.since is None and watch.directions == ()
    scores, classes, confidence = change(QUIET[400:700], classes[400:], confidence[400:])
    watch.update(scores, classes, confidence, [f"{i}.png" for i in range(401, 701)])
    assert watch.alarm and watch.after is not None and watch.since is not None
    assert 300 < watch.since < watch.after
    assert watch.evidence >= 100
    assert direction in watch.directions
    assert 0 < len(watch.carriers) <= 10
    for each in watch.carriers:
        assert watch.since <= each.image <= watch.after and each.gain > 1
        assert each.image <= 400 or each.name == f"{each.image}.png"
    assert "ALARM" in watch.sentence() and direction in watch.sentence()


def test_a_class_watch_at_its_lowest_wealth_names_no_class() -> None:
    watch = fitted()
    classes = watch._martingales[CLASSES]
    classes.peak, classes.low = 5.0, math.inf  # strong evidence once; each image is the lowest since
    watch.update(QUIET[:100] + 3, np.arange(100) % 3, np.full(100, 0.8))
    assert watch.alarm and watch.directions == ("more novel",)


def test_the_level_holds_when_held_out_images_look_more_novel_than_new_ones() -> None:
    streams, level = 60, 0.05
    random = np.random.default_rng(7)
    kinds: dict[str, Any] = {"as is": {}, "one side": {"proven": False}, "stream": {"among": "stream"}}
    rings = {
        name: sum(
            Watch(level, **kind).fit(random.normal(0.5, size=80)).update(random.normal(size=300)).alarm
            for _ in range(streams)
        )
        for name, kind in kinds.items()
    }
    most = binom.ppf(0.999, streams, level)
    assert max(rings["one side"], rings["stream"]) <= most < 3 * most < rings["as is"]
    early = Watch(level, proven=False).fit(QUIET[:80]).update(QUIET[80:180] + 3)
    assert early.directions == ("more novel",)
    late = Watch(level, among="stream").fit(QUIET[:80]).update(QUIET[80:280])
    assert not late.alarm and late.report()["held_out"] == 0
    assert late.update(QUIET[280:380] + 3).directions == ("more novel",)
    for each in (early, late):
        again = Watch.from_json(each.to_json()).update(QUIET[:20])
        assert again.to_json() == each.update(QUIET[:20]).to_json()


def test_a_level_that_is_not_proven_is_said_not_to_be(photo_run: PhotoRun) -> None:
    photo_model = candid.load(photo_run.model)
    score = WatchedScore.of(photo_model)
    assert score.held_out.out_of_fold
    watch = Watch.from_json(score.watch(photo_model.class_names).to_json())
    assert "No bound is proven" in watch.sentence() and watch.report()["proven"] is False
    watch.update([99.0] * 40, [0] * 40, [0.5] * 40)
    assert watch.alarm and "No bound is proven" in watch.sentence() and "at most" not in watch.sentence()
    stream = score.watch(photo_model.class_names, among="stream")
    proven = replace(score.held_out, out_of_fold=False)
    other = WatchedScore.fit(proven, photo_model).watch(photo_model.class_names)
    for each in (stream, other):
        assert "proven" not in each.sentence() and each.report()["proven"] is True


def test_states_of_earlier_versions_load() -> None:
    record = json.loads(fitted().to_json())
    for name in ("among", "proven", "score", "digest"):
        del record[name]
    again = Watch.from_json(json.dumps(record | {"digest": digest(record).hexdigest()}))
    assert again.to_json() == fitted().to_json()
    again.proven = False  # as a model whose held-out images trained it says
    assert Watch.from_json(again.to_json()).to_json() == again.to_json()


def test_images_of_skipped_classes_are_no_step_of_the_class_watch() -> None:
    random = np.random.default_rng(9)
    held_out, scores = random.integers(-1, 3, 200), random.normal(size=300)
    classes = random.integers(-1, 3, 100)
    watch = Watch().fit(scores[:200], held_out, FREQUENCIES).update(scores[200:], classes)
    assert watch._ranks[CLASSES].n == (held_out >= 0).sum() + (classes >= 0).sum()
    assert watch._ranks[SCORES].n == 300 and watch.images == 100
    before = watch._martingales[CLASSES].wealth.log
    watch.update([0.0] * 50, [-1] * 50)
    assert watch._martingales[CLASSES].wealth.log == before and watch.images == 150
    everyone = Watch().fit(scores[:200], held_out[held_out >= 0][np.arange(200) % 100], FREQUENCIES)
    assert everyone.update(scores[200:], classes)._martingales[SCORES].peak == watch._martingales[SCORES].peak


def test_two_watches_share_the_level() -> None:
    scores, classes = QUIET[:300] + 1.2, np.zeros(300, dtype=int)
    alone = Watch(0.01).fit(QUIET[1000:1500]).update(scores)
    both = Watch(0.01).fit(QUIET[1000:1500], classes[:1].repeat(500), [1, 1]).update(scores, classes)
    assert both._martingales[SCORES].peak == alone._martingales[SCORES].peak
    assert alone.alarm and alone.after is not None and both.after is not None and alone.after <= both.after


def test_infinite_scores_are_ranks_like_others() -> None:
    watch = Watch().fit([*QUIET[:200], math.inf, -math.inf]).update([math.inf] * 30)
    assert watch.alarm and watch.directions == ("more novel",)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Watch(1.0), "must be above 0 and below 1"),
        (lambda: Watch(among="held_out"), "'held-out' or 'stream'"),  # type: ignore[arg-type]
        (lambda: Watch().update(1.0), "call fit first"),
        (lambda: Watch().evidence, "call fit first"),
        (lambda: Watch().fit([]), "there are none"),
        (lambda: Watch().fit([1.0, math.nan]), "1 of 2 scores are NaN"),
        (lambda: Watch().fit(["a"]), "must be numbers"),
        (lambda: Watch().fit([[1.0, 2.0]]), "one number per image"),
        (lambda: Watch().fit(QUIET, np.zeros(4000)), "give 'frequencies'"),
        (lambda: Watch().fit(QUIET, np.zeros(3), [1, 1]), "3 classes and scores of 4000"),
        (lambda: Watch().fit([1.0], [0.5], [1, 1]), "whole numbers from 0 to 1"),
        (lambda: Watch().fit([1.0], [0], [1, 0]), "must be above 0"),
        (lambda: fitted().update(1.0), "Give classes to both"),
        (lambda: fitted().update(1.0, 0), "Give the confidence to both"),
        (lambda: fitted().update([1.0, 2.0], [0, 0], [1, 1], ["a"]), "1 names"),
    ],
)
def test_mistakes_are_named_in_one_sentence(mistake: Any, message: str) -> None:
    with pytest.raises(CandidError, match=message):
        mistake()


def test_few_different_scores_are_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "candid"):
        Watch().fit(-8000 + QUIET)  # in float16 they differ by 4
    assert "standardise" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "missing", "binary"])
def test_a_damaged_state_is_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "watch.json"
    fitted().save(file)
    text = file.read_text()
    if damage == "missing":
        file.unlink()
    elif damage == "binary":
        file.write_bytes(b"\xff\xfe")
    else:
        wrong = {"cut": text[:-20], "changed": text.replace('"images": 0', '"images": 7'), "foreign": "[1]"}
        file.write_text(wrong[damage])
    with pytest.raises(CandidError, match=r"watch\.json"):
        Watch.load(file)


def test_a_state_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CandidError, match="free some space"):
        fitted().save(tmp_path / "no folder" / "watch.json")


@pytest.mark.parametrize("name", ["cifar10-resnet", "cifar10-beta1"])
def test_the_watched_score_is_fixed_by_images_that_are_not_ranked(name: str) -> None:
    model = candid.load(name)
    whole = needed(model)
    n, rows = 700, np.random.default_rng(0).permutation(len(whole))
    known, new = whole.statistics.rows(rows[:n]), whole.statistics.rows(rows[n:])
    score = WatchedScore.fit(replace(whole, statistics=known), model)
    seen = score.sightings(new)
    assert len({each.score for each in seen}) > 0.9 * len(seen)
    scores, classes, confidence = zip(*seen, strict=True)
    watch = score.watch(model.class_names).update(scores, classes, confidence)
    assert watch.report()["held_out"] == n - n // FIXING and watch.images == len(whole) - n
    assert not watch.alarm
    order = draws(1).permutation(n)  # only the quarter that fixes it matters for the score
    changed = {key: each.copy() for key, each in known.items()}
    for key in changed.keys() - {"keys"}:  # other images with these values, not copies
        each = changed[key]
        each[order[n // FIXING :]] = each[order[n // FIXING]].copy()
    assert WatchedScore.fit(replace(whole, statistics=Columns(changed)), model).sightings(new) == seen


def test_photo_models_are_watched_by_all_own_scores_adopted_ones_by_distance_and_energy(
    photo_run: PhotoRun,
) -> None:
    photo_model, adopted = candid.load(photo_run.model), candid.load("everyday")
    whole = needed(photo_model)
    score = WatchedScore.fit(whole, photo_model)
    novelty = whole.statistics["novelty"].astype(np.float64)
    assert novelty.shape[1] == 3 and score.measures == {}
    found = np.array([each.score for each in score.sightings(whole.statistics)]).astype(np.float64)
    assert np.allclose(found, ((novelty - score.standard.centre) / score.standard.scale).sum(1))
    two = WatchedScore.fit(whole, adopted)  # of an adopted model with two groups of features
    assert (two.standard.centre == score.standard.centre[1:]).all()
    watches = [each.watch(photo_model.class_names) for each in (score, replace(two, fitted=3))]
    assert [each.score for each in watches] == ["all own parts", ""]
    assert watches[0].report()["held_out"] == len(whole) - len(whole) // FIXING


def test_a_state_of_another_score_is_refused(photo_run: PhotoRun, tmp_path: Path) -> None:
    model = candid.load(photo_run.model)
    score = WatchedScore.of(model)
    start = score.watch(model.class_names)
    before = Watch.from_json(start.to_json())
    before.score = ""  # an earlier version left out the relative distance, and did not name the score
    state = WatchState(tmp_path / "state", score.identity(model), before)
    state.count(["a.png"])
    state.close()
    with pytest.raises(CandidError, match=r"another score of this model: .* to start a new watch"):
        WatchState(tmp_path / "state", score.identity(model), start)
    (tmp_path / "drift-model.json").write_text(before.to_json())
    with pytest.raises(CandidError, match=r"another score of this model: .* to start a new watch"):
        Drift(start.to_json(), "model", tmp_path)
    start.save(tmp_path / "drift-model.json")
    again = Drift(start.to_json(), "model", tmp_path)
    assert again.watch is not None and again.watch.score == start.score
    again.close()


def test_the_class_watch_skips_photos_of_taught_classes(photo_run: PhotoRun, tmp_path: Path) -> None:
    photos = write_photos(tmp_path, ("checks",), 20)
    model = candid.teach(photo_run.model, {"checks": photos / "checks"}).model
    score = WatchedScore.of(model)
    predicted = score.held_out.statistics["predicted"]
    seen = score.sightings(score.held_out.statistics)
    assert len(model.class_names) == 4 and (predicted == 3).sum() > 10
    assert [each.predicted for each in seen] == np.where(predicted < 3, predicted, -1).tolist()
    watch = score.watch(model.class_names)
    assert watch._class_names == CLASS_NAMES
    known = watch._ranks[CLASSES].n
    assert 0 < known < watch._ranks[SCORES].n
    taught, fitted = (next(e for e in seen if (e.predicted < 0) == skipped) for skipped in (True, False))
    watch.update(taught.score, taught.predicted, taught.confidence)
    assert watch._ranks[CLASSES].n == known and watch.images == 1
    watch.update(fitted.score, fitted.predicted, fitted.confidence)
    assert watch._ranks[CLASSES].n == known + 1 and watch.images == 2


def test_other_held_out_images_are_another_watch() -> None:
    model = candid.load("cifar10-resnet")
    score = WatchedScore.of(model)
    other = replace(score, held_out=score.held_out.rows(np.arange(100)))
    assert score.identity(model) == WatchedScore.of(model).identity(model) != other.identity(model)
