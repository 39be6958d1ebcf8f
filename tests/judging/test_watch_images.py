"""The alarm that images have changed: its level, its state, what it says."""

import json
import logging
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binom, kstest

import candid
from candid import CandidError, Watch
from candid._support.numbers import digest
from candid._support.randomness import draws
from candid.judging.held_out import needed
from candid.judging.watched import FIXING, WatchedScore
from candid.trust.bets import Bets, FrequencyBets, PowerBets, bins_of, uniform
from candid.trust.drift import CLASSES, SCORES
from candid.trust.scores import Columns
from experiments import drift
from tests.photo_models import PhotoRun

QUIET = np.random.default_rng(0).normal(size=4000)
FREQUENCIES = {"cat": 0.5, "dog": 0.3, "emu": 0.2}


def fitted(alarm: float = 0.01, n: int = 500) -> Watch:
    """A watch over scores, classes and confidence."""
    random = np.random.default_rng(1)
    classes = random.choice(3, n, p=list(FREQUENCIES.values()))
    return Watch(alarm).fit(random.normal(size=n), classes, FREQUENCIES, random.uniform(0.6, 1, n))


@pytest.mark.parametrize(
    "bets", [PowerBets(), PowerBets(1), FrequencyBets([3, 1, 1, 5]), FrequencyBets([0.9, 0.1])]
)
def test_bets_pay_one_on_average(bets: Bets) -> None:
    for i in range(len(bets)):
        ends = [0, 0.05, 0.1, 0.2, 0.5, 0.6, 0.7, 0.9, 1]
        parts = [
            quad(lambda p: float(bets.factors(np.array(p))[i]), *pair, limit=200)[0]  # noqa: B023
            for pair in pairwise(ends)
        ]
        assert sum(parts) == pytest.approx(1, abs=1e-6)


def test_bets_never_lose_everything() -> None:
    p = np.array([2.0**-53, 0.5, 1 - 2.0**-53])
    for bets in (PowerBets(), FrequencyBets([0.99, 0.01])):
        assert (bets.factors(p) > 0).all() and np.isfinite(bets.factors(p)).all()


def test_bins_keep_the_order_of_float16_values() -> None:
    scores = np.concatenate((QUIET * 10.0 ** np.random.default_rng(2).integers(-8, 4, 4000), [0, -0.0]))
    rounded = scores.astype(np.float16)
    order = np.argsort(rounded, kind="stable")
    bins = bins_of(scores)
    assert (np.diff(bins[order]) >= 0).all()
    assert ((np.diff(bins[order]) == 0) == (np.diff(rounded[order]) == 0)).all()
    assert bins.min() >= 0 and bins.max() < 2**16


@pytest.mark.parametrize("ties", [False, True])
def test_sequential_ranks_are_uniform_and_independent(ties: bool) -> None:
    random = np.random.default_rng(3)
    scores = random.poisson(1.0, (300, 70)) if ties else random.integers(0, 1000, (300, 70))
    p = drift.sequential(scores, 30, random.random((300, 40)))
    assert kstest(p.ravel(), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(p[:, :-1].ravel(), p[:, 1:].ravel())[0, 1]) < 4 / math.sqrt(p.size)
    fixed = drift.fixed(scores, 30, random.random((300, 40)))
    shared = fixed.mean(1).var() * fixed.shape[1] * 12
    assert shared > 1.5 > 1.25 > p.mean(1).var() * p.shape[1] * 12


def test_the_level_holds_and_ranks_among_fixed_images_break_it() -> None:
    streams, n, level = 400, 100, 0.05
    random = np.random.default_rng(4)
    scores, u = random.poisson(30, (streams, n + 1200)), random.random((streams, 1200))
    rings = {
        ranks.__name__: int(
            (drift.log_wealth(PowerBets(), ranks(scores, n, u)).max(1) >= -math.log(level)).sum()
        )
        for ranks in (drift.sequential, drift.fixed)
    }
    most = binom.ppf(0.999, streams, level)
    assert rings["sequential"] <= most < 3 * most < rings["fixed"]


def test_the_level_of_class_frequencies_holds() -> None:
    streams, n, level = 400, 60, 0.05
    random = np.random.default_rng(5)
    classes = random.choice(4, (streams, n + 600), p=[0.4, 0.3, 0.2, 0.1])
    p = drift.sequential(classes, n, random.random((streams, 600)))
    wrong = FrequencyBets([1, 1, 1, 1])  # bets from wrong frequencies lose power, never the level
    for bets in (FrequencyBets([0.4, 0.3, 0.2, 0.1]), wrong):
        rings = (drift.log_wealth(bets, p).max(1) >= -math.log(level)).sum()
        assert rings <= binom.ppf(0.999, streams, level)


def test_the_watch_is_what_was_simulated() -> None:
    watch = fitted().update(
        QUIET[:300], np.arange(300) % 3, np.full(300, 0.8)
    )  # every class once in three images: a change
    random = np.random.default_rng(1)
    held_out = random.choice(3, 500, p=list(FREQUENCIES.values())), random.normal(size=500)
    streams = {CLASSES: np.arange(300) % 3, SCORES: bins_of(QUIET[:300])}
    for key, bets, known in (
        (CLASSES, FrequencyBets(list(FREQUENCIES.values())), held_out[0]),
        (SCORES, PowerBets(), bins_of(held_out[1])),
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
    other = WatchedScore.fit(replace(score.held_out, out_of_fold=False)).watch(photo_model.class_names)
    for each in (stream, other):
        assert "proven" not in each.sentence() and each.report()["proven"] is True


def test_states_of_earlier_versions_load() -> None:
    record = json.loads(fitted().to_json())
    for name in ("among", "proven", "digest"):
        del record[name]
    again = Watch.from_json(json.dumps(record | {"digest": digest(record).hexdigest()}))
    assert again.to_json() == fitted().to_json()
    again.proven = False  # as a model whose held-out images trained it says
    assert Watch.from_json(again.to_json()).to_json() == again.to_json()


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
        (lambda: Watch().fit([[1.0, 2.0]]), "one number an image"),
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
    score = WatchedScore.fit(replace(whole, statistics=known))
    seen = score.sightings(new)
    assert len({each.score for each in seen}) > 0.9 * len(seen)
    scores, classes, confidence = zip(*seen, strict=True)
    watch = score.watch(model.class_names).update(scores, classes, confidence)
    assert watch.report()["held_out"] == n - n // FIXING and watch.images == len(whole) - n
    assert not watch.alarm
    order = draws(1).permutation(n)  # only the quarter that fixes it matters for the score
    changed = {key: each.copy() for key, each in known.items()}
    for each in changed.values():
        each[order[n // FIXING :]] = each[order[n // FIXING]].copy()
    assert WatchedScore.fit(replace(whole, statistics=Columns(changed))).sightings(new) == seen


def test_photo_models_are_watched_by_energy_and_rest_adopted_ones_by_distance_and_energy(
    photo_run: PhotoRun,
) -> None:
    photo_model = candid.load(photo_run.model)
    whole = needed(photo_model)
    score = WatchedScore.fit(whole)
    novelty = whole.statistics["novelty"].astype(np.float64)
    assert novelty.shape[1] == 3 and score.measures == {}
    found = np.array([each.score for each in score.sightings(whole.statistics)]).astype(np.float64)
    energy, rest = ((novelty[:, 1:] - score.standard.centre) / score.standard.scale).T
    assert np.allclose(found, energy + rest)
    adopted = Columns({**whole.statistics, "novelty": novelty[:, :2]})
    both = WatchedScore.fit(replace(whole, statistics=adopted))
    assert both.standard.centre.shape == (2,)
    assert score.watch(photo_model.class_names).report()["held_out"] == len(whole) - len(whole) // FIXING


def test_other_held_out_images_are_another_watch() -> None:
    model = candid.load("cifar10-resnet")
    score = WatchedScore.of(model)
    other = replace(score, held_out=score.held_out.rows(np.arange(100)))
    assert score.identity(model) == WatchedScore.of(model).identity(model) != other.identity(model)
