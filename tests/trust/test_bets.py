"""Bets against "nothing has changed": what they pay, the levels that they keep, states of earlier ones."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import binom, kstest

from candid import CandidError, Watch
from candid._support.numbers import digest
from candid.trust.bets import (
    SCORE_CASH,
    TAILS,
    Bets,
    FrequencyBets,
    PowerBets,
    ScoreBets,
    TailBets,
    Wealth,
    bins_of,
)
from candid.trust.drift import CLASSES, SCORES
from experiments import drift

QUIET = np.random.default_rng(0).normal(size=4000)


@pytest.mark.parametrize(
    "bets",
    [
        PowerBets(),
        TailBets(),
        ScoreBets(),
        ScoreBets(1),
        FrequencyBets([3, 1, 1, 5]),
        FrequencyBets([0.9, 0.1]),
    ],
)
def test_bets_pay_one_on_average(bets: Bets) -> None:
    for i in range(len(bets)):
        ends = sorted({0, 0.05, 0.1, 0.2, 0.5, 0.6, 0.7, 0.9, 1, *(width for width, _ in TAILS)})
        parts = [
            quad(lambda p: float(bets.factors(np.array(p))[i]), *pair, limit=200)[0]  # noqa: B023
            for pair in pairwise(ends)
        ]
        assert sum(parts) == pytest.approx(1, abs=1e-6)


def test_bets_never_lose_everything() -> None:
    p = np.array([2.0**-53, 0.5, 1 - 2.0**-53])
    for bets in (PowerBets(), ScoreBets(), FrequencyBets([0.99, 0.01])):
        assert (bets.factors(p) > 0).all() and np.isfinite(bets.factors(p)).all()


def test_bets_on_one_side_never_pay_more_for_an_image_that_looks_more_usual() -> None:
    p = np.linspace(2.0**-53, 1 - 2.0**-53, 2001)
    assert (np.diff(ScoreBets(1).factors(p), axis=0) <= 0).all()
    both = ScoreBets().factors(p)
    assert (both[:, : ScoreBets.small] == ScoreBets(1).factors(p)).all()
    assert (np.diff(both[:, ScoreBets.small :], axis=0) >= 0).all()


@pytest.mark.parametrize("sides", [1, 2])
def test_cash_goes_to_bets_as_it_was_divided_at_the_start(sides: int) -> None:
    bets = ScoreBets(sides)
    wealth = Wealth.on(bets)
    start = wealth.shares.copy()
    assert start.sum() == pytest.approx(1) and start[0] == SCORE_CASH
    for _ in range(5):  # bets that pay nothing more than cash change nothing
        wealth.step(np.ones(len(bets)))
        assert wealth.shares[1:] / wealth.shares[1] == pytest.approx(start[1:] / start[1])
    wealth.step(np.r_[np.full(3, 2.0), np.full(len(bets) - 3, 0.0)])  # all but three lose everything
    lost = wealth.shares[4:]
    assert (lost > 0).all() and lost / lost[0] == pytest.approx(start[4:] / start[4])


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


@pytest.mark.parametrize("bets", [ScoreBets(), ScoreBets(1)])
def test_quiet_streams_keep_the_level(bets: Bets) -> None:
    streams, n, level = 400, 60, 0.05
    random = np.random.default_rng(8)
    scores = random.integers(0, 40, (streams, n + 800))
    path = drift.log_wealth(bets, drift.sequential(scores, n, random.random((streams, 800))))
    rings = (path.max(1) >= -math.log(level)).sum()
    assert rings <= binom.ppf(0.999, streams, level)


def test_a_few_far_outliers_are_found_earlier_than_by_power_bets_alone() -> None:
    found = drift.with_drawn_scores("10 % far", streams=60, n=200, length=500)
    for sides in ("one side", "two sides"):
        before, now = (found[f"{name}, {sides}"] for name in ("power bets", "now"))
        assert before["median"] is not None and now["median"] is not None
        assert now["median"] < 0.7 * before["median"]
        assert now["found"] > before["found"] + 0.1


def test_a_class_watch_after_teaching_stays_quiet() -> None:
    found = drift.after_teaching(streams=200, length=400)
    for stream in ("no photo of the class", "30 % of the class"):
        skipped, counted = (
            found[f"{how}, {stream}"]["found"] for how in ("taught photos skipped", "counted")
        )
        assert skipped <= 0.02 < 0.6 < counted, stream


def test_the_level_holds_and_ranks_among_fixed_images_break_it() -> None:
    streams, n, level = 400, 100, 0.05
    random = np.random.default_rng(4)
    scores, u = random.poisson(30, (streams, n + 1200)), random.random((streams, 1200))
    rings = {
        ranks.__name__: int(
            (drift.log_wealth(ScoreBets(), ranks(scores, n, u)).max(1) >= -math.log(level)).sum()
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


def signed(record: dict[str, Any]) -> str:
    """The text of a state."""
    return json.dumps(record | {"digest": digest(record).hexdigest()})


OLD: dict[str, Any] = {
    "format": "candid-watch", "format_version": 1, "library_version": "0.1.0", "level": 0.01, "seed": 3,
    "among": "held-out", "proven": True, "images": 5, "classes": {"cat": 0.5, "dog": 0.3, "emu": 0.2},
    "predicted": [1, 0, 0],
    "watches": [
        {
            "bins": [
                16896, 17152, 17408, 17920, 18432, 19456, 32768, 46080, 47104, 47616, 48128, 48384,
                48640, 49152
            ],
            "counts": [1, 1, 1, 1, 1, 1, 2, 1, 2, 1, 2, 1, 1, 1],
            "shares": [
                0.12148942085864535, 0.6055609169517823, 0.19762399170397738, 0.05262360827361909,
                0.0026304320436054017, 0.006580072329002675, 0.013491557839367788
            ],
            "log": 1.4219725264193068, "peak": 1.4219725264193068, "low": -0.11515306609469105, "low_at": 3,
            "carriers": [[5, "4.png", 2.393556405188516], [4, "3.png", 1.943217874119644]]
        },
        {
            "bins": [0, 1, 2], "counts": [7, 6, 4],
            "shares": [
                0.4936646151458565, 0.0039525768927122715, 0.01634840156854156, 0.08648180422948668,
                0.1038489328198891, 0.044674540704465214, 0.04632137027607684, 0.029654050068223074,
                0.00888137165559141, 0.07401770396016019, 0.05565296562680943, 0.026663841068958378,
                0.009837825983229435
            ],
            "log": 0.012874047721196005, "peak": 0.08263828865386083, "low": -0.042124769972767304,
            "low_at": 4, "carriers": [[5, "4.png", 1.056539365521886]]
        }
    ],
    "confidence": [
        {"n": 12, "sum": 10.14, "squares": 8.582600000000001},
        {"n": 2, "sum": 1.4, "squares": 0.9799999999999999},
    ],
    "rang": None,
    "digest": "b2ea770a6e9518b724334063887083ea9e00da48f6178bcca1c588b05d600834",
}  # fmt: skip
"""What the version with power bets alone wrote."""
OLD_ONE_SIDE: dict[str, Any] = {
    **{key: value for key, value in OLD.items() if key != "digest"},
    "proven": False,
    "watches": [
        {
            **OLD["watches"][0],
            "shares": [0.06683948189237943, 0.6602942997195345, 0.21548619492938506, 0.057380023458701086],
            "log": 2.0285894550028036,
        },
        OLD["watches"][1],
    ],
}
"""The same, of a model whose held-out images trained it."""


@pytest.mark.parametrize(
    ("state", "wealth"),
    [(json.dumps(OLD), 4.278815355619763), (signed(OLD_ONE_SIDE), 4.967932991687725)],
    ids=["two sides", "one side"],
)
def test_a_stream_goes_on_with_the_bets_that_it_began_with(state: str, wealth: float) -> None:
    watch = Watch.from_json(state)
    bets = len(watch._bets[SCORES])
    assert bets == len(json.loads(state)["watches"][SCORES]["shares"]) - 1 < len(ScoreBets(1))
    for _ in range(2):
        watch = Watch.from_json(watch.to_json())
    watch.update([2.0, 1.0, 0.0, 3.0, 3.0, 3.0], [0, 1, 2, 0, 0, 0], [0.7] * 6)
    assert len(watch._bets[SCORES]) == bets
    found = [float(watch._martingales[key].wealth.log) for key in (SCORES, CLASSES)]
    assert found == pytest.approx([wealth, 0.05377242598912298], rel=1e-12)  # as that version went on


def test_bets_and_shares_of_a_state_must_agree() -> None:
    for wrong in ({"bets": 2}, {"bets": 3}):
        record = {key: value for key, value in OLD.items() if key != "digest"} | wrong
        with pytest.raises(CandidError, match="start again with fit"):
            Watch.from_json(signed(record), "watch.json")
