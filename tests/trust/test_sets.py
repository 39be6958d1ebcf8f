"""Answers: the larger of the conformal set and the most probable classes, trees, taught classes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candid import CandidError, Monitor
from candid._support.numbers import Array, softmax
from candid.judging.group import GroupResult
from candid.trust.ranking import ALL
from candid.trust.scores import Columns
from candid.trust.sets import LIKELY, TAUGHT_BOUND, Truths, answers
from candid.trust.tree import Tree

ABOVE = {
    **{f"cat{i}": "cat" for i in range(4)},
    **{f"dog{i}": "dog" for i in range(4)},
    "cat": "animal",
    "dog": "animal",
    "car": "thing",
    "animal": "thing",
}
NAMES = (*(f"cat{i}" for i in range(4)), *(f"dog{i}" for i in range(4)), "car")
TREE = Tree.of(ABOVE, NAMES)


def posteriors(n: int, spread: float, seed: int, classes: int = 9) -> Array:
    return softmax(spread * np.random.default_rng(seed).normal(size=(n, classes)))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 99), st.floats(0.01, 1), st.floats(0, 0.99), st.sampled_from([9, 2 * LIKELY + 1]))
def test_an_answer_is_the_larger_of_two_sets(seed: int, ratio: float, confidence: float, width: int) -> None:
    posterior = posteriors(5, 2, seed, width)
    named = answers(posterior, np.full(5, ratio), confidence)
    for row, classes in zip(posterior, named, strict=True):
        order = np.argsort(-row, kind="stable")
        mass = 1 + int((row[order].cumsum() < confidence - 1e-12).sum()) if confidence > row.max() else 1
        size = max(int((row / row.max() >= ratio).sum()), min(mass, len(row)))
        assert sorted(order[:size].tolist()) == np.flatnonzero(classes).tolist()


def test_a_pear_is_not_ruled_out() -> None:
    (named,) = answers(np.array([[0.52, 0.48]]), np.array([1.0]), 0.8)
    assert named.all()


def plain_answer(posterior: Array, size: int) -> set[int]:
    order = np.argsort(-posterior, kind="stable")
    if size <= 3:
        return set(order[:size].tolist())
    cover = TREE.cover(order[:size])
    return set(np.flatnonzero(TREE.covers_class(cover)).tolist())


def test_reach_is_the_first_answer_with_the_true_class() -> None:
    posterior = posteriors(300, 1, 0)
    labels = np.random.default_rng(1).integers(9, size=300)
    ratio, mass = TREE.reach(posterior, labels)
    for row, y, r, m in zip(posterior, labels.tolist(), ratio, mass, strict=True):
        falling = np.sort(row)[::-1]
        k = next(k for k in range(1, 10) if y in plain_answer(row, k))
        assert (r, m) == pytest.approx((falling[k - 1] / falling[0], falling[: k - 1].sum()))


@pytest.mark.parametrize("confidence", [0.0, 0.8])
def test_answers_with_a_tree_keep_the_level_of_error(confidence: float) -> None:
    """Logits of true posteriors, distorted: levels don't depend on them."""
    missed, kinds = [], set()
    for seed in range(40):
        posterior = posteriors(700, 1.5, seed)
        labels = (posterior.cumsum(1) < np.random.default_rng(seed).random((700, 1))).sum(1).clip(max=8)
        logits = 2 * np.log(posterior)
        monitor = Monitor(error=0.1, confidence=confidence)
        monitor.fit(logits[:400], labels[:400], class_names=NAMES, tree=ABOVE)
        examinations = monitor.examine(logits[400:])
        known = [(e, y) for e, y in zip(examinations, labels[400:].tolist(), strict=True) if e.classes]
        missed.append(np.mean([NAMES[y] not in (e.classes or ()) for e, y in known]))
        kinds |= {e.node for e in examinations}
        for e in examinations:
            assert e.node is None or (e.node_leaves == len(e.classes or ()) and e.verdict == "ambiguous")
    assert np.mean(missed) <= 0.1 + 3 * np.std(missed) / 40**0.5
    assert kinds <= {None, "cat", "dog", "animal"} and len(kinds) > 1


def test_a_small_kind_can_be_accepted() -> None:
    posterior = posteriors(400, 0.3, 0)
    posterior[:, :4] *= 30
    logits = np.log(posterior)
    labels = np.arange(400) % 4
    labels[:5] = np.arange(4, 9)
    for accept, verdict in ((0, "ambiguous"), (4, "accept")):
        monitor = Monitor(accept_kinds=accept, confidence=0.95).fit(
            logits, labels, class_names=NAMES, tree=ABOVE
        )
        kinds = [e for e in monitor.examine(logits) if e.node == "cat"]
        assert len(kinds) > 50 and {e.verdict for e in kinds} == {verdict}
        accepted = "one kind of classes fits clearly" in kinds[0].plain
        assert accepted == (verdict == "accept")
        assert any("kind of at most 4 classes is accepted" in s for s in monitor.sentences()) == accepted
        record = kinds[0].to_dict()
        assert record["class_count"] == 4 and record["promises"]["accept_kinds"] == accept
        place = f"accepted/{kinds[0].node}" if accepted else "ambiguous"
        assert GroupResult((kinds[0],), (), ()).places() == {kinds[0].path: place}
    undecided = Monitor(error=0.01, confidence=0.95).fit(
        np.log(posteriors(400, 0.3, 1)), labels, class_names=NAMES, tree=ABOVE
    )
    (wide, *_) = [e for e in undecided.examine(logits) if e.classes is not None and len(e.classes) > 5]
    record = wide.to_dict()
    assert record["classes"] == list((wide.classes or ())[:5]) and record["class_count"] == len(
        wide.classes or ()
    )
    with pytest.raises(CandidError, match="leave accept_kinds"):
        Monitor(accept_kinds=4, risk=0.1).fit(logits, labels)
    with pytest.raises(CandidError, match="no tree of classes here"):
        Monitor(accept_kinds=4).fit(logits, labels)


def test_a_taught_class_has_a_bound_of_its_own() -> None:
    ratios = np.linspace(0.01, 1, 100)
    taught = np.full(100, -1)
    for n, expected in ((10, TAUGHT_BOUND), (19, None)):
        taught[:] = -1
        taught[:n] = 7
        one_object = np.where(taught == 7, 1.0, ratios)  # all photos left out are recognised
        capped = Truths(one_object, np.full(100, ALL), np.ones(100, bool), taught).bounds(0.05)
        assert capped == {7: TAUGHT_BOUND}
        truths = Truths(ratios, np.full(100, ALL), np.ones(100, bool), taught)
        (bound,) = truths.bounds(0.05).values()
        assert bound == (ratios[:n].min() if expected is None else expected)
        assert truths.count(ALL) == 100 - n
        assert truths.smallest_ratio(ALL, 0.05) == ratios[n:][int(0.05 * (101 - n)) - 1]
    columns = Columns({"true_posterior": ratios, "max_posterior": np.ones(100), "taught": taught})
    again = Truths.of(columns, np.full(100, ALL), np.ones(100, bool), 0.8, None)
    assert Truths.restored(again.state()).bounds(0.05) == again.bounds(0.05)


BAD = {
    "tabby,cat\ncat,animal\nanimal,cat\n": "goes round in a circle",
    "tabby,cat\nlynx,cat\n": "The class 'dog' has no kind above it",
    "tabby,cat\nlynx,cat\ndog,pet\n": "2 roots, such as 'cat' and 'pet'",
    "tabby,cat\nlynx,cat\ndog,cat\nmouse,cat\n": "'mouse', which is no class of the model",
    "tabby,cat\nlynx,tabby\ndog,cat\n": "'tabby' is a class and also a kind",
    "tabby,cat\nlynx,cat\ndog,cat\nup,down\ndown,up\n": "in a circle: (up > down > up|down > up > down)",
    "tabby cat\n": "Line 1",
    "tabby,cat\ntabby,pet\n": "stands below 'cat' and below 'pet'",
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_tree_is_refused_in_one_sentence(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tree") / "tree.csv"
    path.write_text(text)
    with pytest.raises(CandidError, match=BAD[text]) as refused:
        Tree.read(path, ("tabby", "lynx", "dog"))
    assert "\n" not in str(refused.value)


def test_monitors_take_trees_as_files_and_of_their_classes_only(tmp_path: Path) -> None:
    logits, labels = np.log(posteriors(300, 1, 0)), np.arange(300) % 9
    file = tmp_path / "tree.csv"
    file.write_text("\n".join(f"{name},{kind}" for name, kind in ABOVE.items()))
    for path in (file, str(file)):
        assert Monitor().fit(logits, labels, class_names=NAMES, tree=path).fitted.rule.tree == TREE
    with pytest.raises(CandidError, match="tree is of 9 classes, but the logits have 8 columns"):
        Monitor().fit(logits[:, :8], labels % 8, tree=TREE)
    with pytest.raises(CandidError, match="'tree' is a dictionary .* not list"):
        Monitor().fit(np.zeros((30, 2)), np.arange(30) % 2, tree=["cat"])  # type: ignore[arg-type]
    with pytest.raises(CandidError, match="can't be read"):
        Monitor().fit(logits, labels, class_names=NAMES, tree=tmp_path / "none.csv")


def test_a_tree_is_saved_with_its_monitor(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("monitor")
    logits = np.log(posteriors(300, 1, 0))
    monitor = Monitor().fit(logits, np.arange(300) % 9, class_names=NAMES, tree=ABOVE)
    monitor.save(folder)
    loaded = Monitor.load(folder)
    assert loaded.fitted.rule.tree == TREE
    assert loaded.examine(logits[:50]) == monitor.examine(logits[:50])
