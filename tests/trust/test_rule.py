"""Class sets and verdicts are their definitions, and hold their levels."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid.trust.conformal import TwoTailed
from candid.trust.promises import Levels
from candid.trust.ranking import ALL, Ranking
from candid.trust.rule import Rule
from candid.trust.scores import SCORES, Columns, Score
from candid.trust.sets import Truths
from candid.trust.verdict import KINDS, Risk

LEVELS = st.floats(0.05, 0.95) | st.sampled_from([0.05, 0.1, 0.25, 0.5])
TWELFTHS = st.integers(0, 12).map(lambda k: k / 12)  # make ties
POSTERIORS = st.integers(1, 4).flatmap(
    lambda m: st.lists(
        st.lists(TWELFTHS, min_size=m, max_size=m).filter(lambda row: max(row) > 0), min_size=1, max_size=6
    )
)
REPEATS = 800
HELD_OUT = st.lists(TWELFTHS | st.floats(0, 1), min_size=19, max_size=40)


def rule_of(
    true_ratios: list[float] | Array, novelty: float = 0.01, error: float = 0.05, confidence: float = 0.0
) -> Rule:
    """The rule of held-out images with these ratios of true classes; any score ranks them."""
    ratios = np.asarray(true_ratios, np.float64)
    groups = np.full(len(ratios), ALL)
    ranking = Ranking(SCORES["energy"], {}, np.arange(float(len(ratios))), groups, groups)
    truths = Truths(ratios, groups, np.ones(len(ratios), bool))
    return Rule.of([ranking], truths, Levels(novelty=novelty, error=error, confidence=confidence))


def verdicts(rule: Rule, posterior: Array, p: Array) -> list[tuple[str, tuple[int, ...]]]:
    """Verdicts, and the numbers of the classes that fit."""
    named, cut = rule.named(posterior), rule.promises[ALL].novelty.cut
    order = np.argsort(-posterior, axis=1, kind="stable")
    return [
        ("novel", ())
        if share <= cut
        else ("accept" if classes.sum() == 1 else "ambiguous", tuple(row[classes[row]].tolist()))
        for share, classes, row in zip(p.tolist(), named, order, strict=True)
    ]


@settings(deadline=None)
@given(POSTERIORS, HELD_OUT, LEVELS, LEVELS, st.data())
def test_verdicts_are_the_plain_loops(
    posterior: list[list[float]], held_out: list[float], novelty: float, error: float, data: st.DataObject
) -> None:
    rule = rule_of(held_out, novelty, error)
    error = rule.promises[ALL].error.in_force
    cut = rule.promises[ALL].novelty.cut
    p = [data.draw(st.just(cut) | st.floats(0, 1)) for _ in posterior]
    judged = verdicts(rule, np.array(posterior), np.array(p))
    for row, p_value, (kind, classes) in zip(posterior, p, judged, strict=True):
        if p_value <= cut:
            assert (kind, classes) == ("novel", ())
            continue
        fits = [
            (1 + sum(q <= share / max(row) for q in held_out)) / (len(held_out) + 1) > error for share in row
        ]
        named = sorted(np.flatnonzero(fits).tolist(), key=lambda y: (-row[y], y))
        assert classes == tuple(named) and kind == ("accept" if len(named) == 1 else "ambiguous")


def images(repeats: int, n: int, generator: np.random.Generator) -> tuple[Array, Array, Array]:
    """Posteriors of overlapping classes, overconfident and with ties; labels; log p(x)."""
    labels = generator.integers(3, size=(repeats, n))
    logits = 4 * generator.normal(size=(repeats, n, 3))
    np.put_along_axis(logits, labels[..., None], np.take_along_axis(logits, labels[..., None], 2) + 5, 2)
    posterior = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
    return (20 * posterior).round() / 20, labels, generator.normal(size=(repeats, n))


def mistakes(
    n: int, novelty: float, error: float, truth_seen: bool, generator: np.random.Generator
) -> tuple[float, float, float]:
    """Shares of images called novel, of sets without the true class, and of verdicts that do not name it."""
    novel = missed = unnamed = 0
    for x, y, density in zip(*images(REPEATS, n + 1, generator), strict=True):
        true = (x[1:] / x[1:].max(1, keepdims=True))[np.arange(n), y[1:]] if truth_seen else np.ones(n)
        rule = rule_of(true, novelty, error)
        p = TwoTailed().fit(density[1:]).p_value(density[:1])
        ((kind, classes),) = verdicts(rule, x[:1], p)
        ((_, fitting),) = verdicts(rule, x[:1], np.ones(1))
        novel += kind == "novel"
        missed += int(y[0]) not in fitting
        unnamed += int(y[0]) not in classes
    return novel / REPEATS, missed / REPEATS, unnamed / REPEATS


def noise(level: float) -> float:
    return 4 * math.sqrt(level * (1 - level) / REPEATS)


@pytest.mark.parametrize(("n", "novelty", "error"), [(39, 0.05, 0.1), (9, 0.2, 0.3), (19, 0.5, 0.05)])
def test_both_levels_hold(n: int, novelty: float, error: float, generator: np.random.Generator) -> None:
    novel, missed, unnamed = mistakes(n, novelty, error, True, generator)
    assert novelty - noise(novelty) <= novel <= novelty + noise(novelty)
    assert missed <= error + noise(error)
    assert unnamed <= novelty + error + noise(novelty + error)


def test_the_check_finds_sets_that_are_too_small(generator: np.random.Generator) -> None:
    """Ratios of 1, as if all answers were right: what an overconfident model thinks of itself."""
    _, missed, _ = mistakes(39, 0.05, 0.1, False, generator)
    assert missed > 0.1 + noise(0.1)


def test_what_an_image_is_called() -> None:
    rule = rule_of(np.linspace(0.3, 1, 199))
    posterior = np.array([[0.0, 0.97, 0.03], [0.1, 0.4, 0.5], [0.4, 0.2, 0.4], [0.05, 0.21, 0.05]])
    assert verdicts(rule, posterior, np.array([0.5, 0.011, 1.0, 0.9])) == [
        ("accept", (1,)),
        ("ambiguous", (2, 1)),
        ("ambiguous", (0, 2, 1)),
        ("accept", (1,)),  # its posterior is low, but far above those of the others
    ]
    assert verdicts(rule, posterior[:1], np.array([0.01])) == [("novel", ())]
    undecided = np.full((1, 100), 0.01)
    assert verdicts(rule_of([1.0] * 200), undecided, np.ones(1)) == [("ambiguous", tuple(range(100)))]
    assert verdicts(rule, posterior[:0], np.empty(0)) == []


def test_confidence_that_is_too_low_for_the_risk_makes_ambiguous_and_names_the_runner_up() -> None:
    posterior = np.array([[0.05, 0.95, 0], [0.1, 0.2, 0.7], [0.9, 0.04, 0.06], [0, 0, 1]])
    rule = rule_of(np.full(100, 0.7))
    risk = Risk(0.05, 0.05, 0.92, 0.5, 100, 50, 0)
    rule = replace(rule, promises={ALL: replace(rule.promises[ALL], risk=risk)})
    assert verdicts(rule, posterior, np.array([1, 1, 1, 0.01])) == [
        ("accept", (1,)),
        ("ambiguous", (2, 1)),
        ("ambiguous", (0, 2)),
        ("novel", ()),
    ]


@pytest.mark.parametrize("level", [0.001, 0.01, 0.05, 1 / 3, 0.07])
@pytest.mark.parametrize("name", ["novelty", "error"])
def test_a_level_that_too_few_images_allow_is_raised(name: str, level: float) -> None:
    needed = math.ceil(1 / level) - 1
    for n, raised in ((needed - 1, True), (needed, False)):
        promises = rule_of(np.full(n, 0.5), **{"novelty": 0.5, "error": 0.5} | {name: level}).promises[ALL]
        in_force = getattr(promises, name).in_force
        assert in_force == pytest.approx(1 / (n + 1)) if raised else in_force == level


def columns(n: int, seed: int = 0) -> tuple[Columns, Array]:
    """Logits and features of imagined images, and their labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(3, size=n)
    features = random.normal(size=(n, 5)) + 3 * np.eye(3, 5)[labels]
    return Columns({"logits": 2 * features[:, :3], "features": features}, labels), labels


def test_groups_and_a_risk_can_be_promised_together() -> None:
    known, labels = columns(2000)
    groups = np.arange(2000) % 2
    rule = Rule.fit(known, labels, groups, levels=Levels(risk=0.1, novelty=0.05))
    assert set(rule.promises) == {ALL, 0, 1}
    assert all(promise.risk == rule.promises[ALL].risk is not None for promise in rule.promises.values())
    new, truth = columns(1000, 1)
    examined = rule.examine(new, range(1000), ("a", "b", "c"), np.arange(1000) % 2)
    accepted = [(e.label, y) for e, y in zip(examined, truth.tolist(), strict=True) if e.verdict == "accept"]
    assert len(accepted) > 300 and np.mean([label != "abc"[y] for label, y in accepted]) < 0.1
    assert {e.promises for e in examined} == {rule.promises[0], rule.promises[1]}


@pytest.mark.parametrize("promise", ["average", "confident"])
@pytest.mark.parametrize("n", [200, 800])
def test_a_restored_rule_gives_the_same_verdicts(n: int, promise: str) -> None:
    known, labels = columns(n)
    levels = Levels(score="combined", novelty=0.1, novelty_promise=promise)  # type: ignore[arg-type]
    rule = Rule.fit(known, labels, np.arange(n) % 2, levels=levels)
    again = Rule.restored("combined", rule.state(), levels, {})
    new, _ = columns(100, 1)
    groups = np.arange(100) % 3
    expected = rule.examine(new, range(100), ("a", "b", "c"), groups)
    assert again.examine(new, range(100), ("a", "b", "c"), groups) == expected
    assert again.false_alarms("abc") == rule.false_alarms("abc")


def test_a_score_of_ones_own_ranks_and_comes_back() -> None:
    score = Score("margin", "classifier", ("max_logit",), "TwoTailed")
    SCORES["margin"] = score
    try:
        known, labels = columns(300)
        levels = Levels(score="margin", novelty=0.05)
        rule = Rule.fit(known, labels, levels=levels)
        new, _ = columns(50, 1)
        expected = TwoTailed().fit(known["max_logit"]).p_value(new["max_logit"])
        assert np.array_equal(rule.p_values(new), expected)
        assert np.array_equal(Rule.restored("margin", rule.state(), levels, {}).p_values(new), expected)
    finally:
        del SCORES["margin"]


def test_without_labels_nothing_is_promised_about_classes() -> None:
    known, _ = columns(300)
    unlabelled = Columns({"logits": known["logits"]})
    rule = Rule.fit(unlabelled, levels=Levels(novelty=0.05, confidence=0), groups=np.arange(300) % 2)
    assert rule.promises[ALL].error.in_force == 1
    examined = rule.examine(unlabelled, range(300), ("a", "b", "c"), np.arange(300) % 2)
    assert {e.verdict for e in examined} == {"accept", "novel"}
    for levels in (Levels(error=0.1), Levels(risk=0.1)):
        with pytest.raises(CandidError, match="have no labels"):
            Rule.fit(unlabelled, levels=levels)


def test_the_kinds_of_verdicts_are_described_once() -> None:
    assert list(KINDS) == ["novel", "ambiguous", "accept"]
    assert all(name == kind.word and kind.sentence.endswith(".") for name, kind in KINDS.items())
