"""A monitor of any classifier: verdicts at stated levels, few images, groups, files, bad input."""

import json
import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.stats import norm

import candid
from candid import CandidError, CheckpointError, Monitor
from candid._support.numbers import softmax


class Images(NamedTuple):
    """What an imagined classifier says of images of three classes."""

    logits: np.ndarray
    labels: np.ndarray
    features: np.ndarray


def images(n: int, seed: int = 0, shift: float = 0.0) -> Images:
    """Features around three means; the logits are right about most classes, and ``shift`` makes outliers."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % 3
    features = random.normal(size=(n, 6)) + shift
    features[np.arange(n), labels] += 4
    return Images(features[:, :3] * 1.5, labels, features)


def repeated(known: Images, copies: int) -> Images:
    return Images(*(np.repeat(part, copies, axis=0) for part in known))


def fitted(n: int = 600, seed: int = 0, **options: Any) -> Monitor:
    known = images(n, seed)
    return Monitor(**options).fit(known.logits, known.labels, known.features)


def p_values(monitor: Monitor, new: Images) -> list[float | None]:
    return [each.p_value for each in monitor.examine(new.logits, new.features)]


def test_ordinary_images_are_accepted_and_others_are_novel() -> None:
    monitor = fitted()
    new, far = images(300, 1), images(30, 2, shift=-6)
    found = monitor.examine(new.logits, new.features)
    assert sum(each.verdict == "accept" for each in found) > 250
    assert [each.path for each in found] == [str(i) for i in range(300)]
    assert all(each.verdict == "novel" for each in monitor.examine(far.logits, far.features))
    posterior = np.exp(new.logits[0]) / np.exp(new.logits[0]).sum()
    assert found[0].posterior == pytest.approx(dict(zip("012", posterior, strict=True)))
    assert found[0].promises == monitor.promises and monitor.promises.n_reference == 300


def test_neither_order_nor_kind_of_arrays_matters() -> None:
    known, new = images(500), images(50, 1)
    monitor = Monitor().fit(known.logits, known.labels, known.features)
    expected = p_values(monitor, new)
    shuffle = np.random.default_rng(0).permutation(500)
    for kind in (lambda each: each[shuffle], torch.from_numpy, lambda each: each.tolist()):
        other = Monitor().fit(*map(kind, known))
        assert p_values(other, new) == pytest.approx(expected) and other.promises == monitor.promises


def test_copies_of_an_image_stay_on_one_side_and_count_once() -> None:
    known = images(30)
    logits, labels, features = (np.repeat(each, 20, axis=0) for each in known)
    monitor = Monitor(score="mahalanobis").fit(logits, labels, features)
    folds = [set(ranking.values.round(5).tolist()) for ranking in monitor.fitted.rule.rankings]
    assert sum(map(len, folds)) == len(set.union(*folds)) == 30
    assert monitor.promises.n_reference == 30 and monitor.promises.copies == 570
    assert "570 of the held-out images are copies" in " ".join(monitor.sentences())
    assert sum(count for _, count in monitor.false_alarms().values()) == 30


@pytest.mark.parametrize("copies", [2, 5])
@pytest.mark.parametrize("n", [60, 450])
def test_levels_hold_with_copies(n: int, copies: int) -> None:
    sets, new = 40, 60
    novel = np.array(
        [
            p_values(
                Monitor().fit(*repeated(images(n, 2 * seed), copies)),
                images(new, 2 * seed + 1),
            )
            for seed in range(sets)
        ]
    )
    for level in (0.05, 0.1):
        noise = 3 * (level * (1 - level) / (sets * new) * (1 + 2 * new / n)) ** 0.5
        assert (novel <= level + 1e-9).mean() <= level + noise


def test_images_of_one_name_count_once_and_stay_on_one_side() -> None:
    known = images(600)
    random = np.random.default_rng(0)
    series = np.repeat(np.arange(120), 5)
    monitor = Monitor(novelty=0.1).fit(*known, together=series)
    assert monitor.promises.n_reference == 120 and monitor.promises.copies == 480
    shuffle = random.permutation(600)
    again = Monitor(novelty=0.1).fit(*Images(*(part[shuffle] for part in known)), together=series[shuffle])
    assert again.promises == monitor.promises
    with pytest.raises(CandidError, match="'together' must name the group of each of the 600 images"):
        Monitor().fit(*known, together=series[:-1])


def test_small_and_unseen_groups_are_ranked_among_small_groups() -> None:
    """The level over all images holds, although images of small groups are harder."""
    random, novel = np.random.default_rng(0), []
    for _ in range(30):
        groups = np.where(random.random(1000) < 0.9, 0, 1 + random.integers(20, size=1000))
        new_groups = np.where(random.random(400) < 0.9, 0, 1 + random.integers(20, size=400))

        def logits(groups: np.ndarray) -> np.ndarray:
            energy = random.normal(size=len(groups)) + 2 * (groups > 0)
            return np.stack((-energy, np.full(len(groups), -50.0)), 1)

        monitor = Monitor(novelty=0.1, score="energy").fit(
            logits(groups), np.arange(1000) % 2, by=groups.astype(str)
        )
        p = np.array(
            [e.verdict == "novel" for e in monitor.examine(logits(new_groups), by=new_groups.astype(str))]
        )
        novel.append(p.mean())
    assert np.mean(novel) <= 0.1 + 3 * np.std(novel) / 30**0.5


def test_fdr_replaces_the_level_of_novelty() -> None:
    monitor = fitted(1000, fdr=0.1)
    new, far = images(190, 1), images(10, 2, shift=-8)
    mixed = [np.concatenate(parts) for parts in zip(new, far, strict=True)]
    verdicts = [e.verdict for e in monitor.examine(mixed[0], mixed[2])]
    assert verdicts[190:].count("novel") >= 8 and verdicts[:190].count("novel") <= 5
    assert "False discoveries 10 %" in " ".join(monitor.sentences())
    monitor.fdr = None  # what was fitted counts
    assert [e.verdict for e in monitor.examine(mixed[0], mixed[2])] == verdicts
    for two in (Monitor(fdr=0.1, novelty=0.1), Monitor(fdr=0.1, risk=0.1)):
        with pytest.raises(CandidError, match="leave one of them out"):
            two.fit(*images(60))
    with pytest.raises(CandidError, match="leave one of them out"):
        candid.examine("waste", np.zeros((32, 32, 3)), novelty=0.1, fdr=0.1)


@pytest.mark.parametrize("wrong", [[0.1, float("nan")], [[0.1], [0.2]], [0.0, 0.5], [1.5]])
def test_what_are_no_p_values_of_a_batch_is_refused(wrong: Any) -> None:
    with pytest.raises(CandidError, match="p-values of N images must be N numbers"):
        Monitor.select(wrong, fdr=0.1)
    assert Monitor.select([], fdr=0.1).shape == (0,)


def test_false_discoveries_say_what_is_not_proven_and_what_few_images_allow() -> None:
    said = {score: fitted(600, fdr=0.1, score=score).sentences()[0] for score in ("energy", "combined")}
    assert all("at most this share is ordinary" in each and "proven" not in each for each in said.values())
    assert "with 600 held-out images to rank among, none or at least 1.66 %" in said["energy"]
    known = images(600)
    copied = Images(*(np.concatenate((part, part[:1])) for part in known))
    unproven = Monitor(fdr=0.1, score="energy").fit(*copied)
    assert "about this share" in unproven.sentences()[0] and "no bound is proven" in unproven.promises.plain()
    none = Monitor(fdr=0.02, score="energy").fit(*images(30)).sentences()[0]
    assert (
        none.startswith("No image can be called novel")
        and "30 held-out images rank others, and at least 49" in none
    )
    assert set(Monitor(fdr=0.02, score="energy").fit(*images(49)).promises.raised()) == set()


SPLITS: list[dict[str, Any]] = [{}, {"fdr": 0.1}, {"novelty_promise": "confident"}]


def test_few_series_give_one_sentence() -> None:
    known = images(60)
    for together in (np.zeros(60), np.arange(60) % 2):
        for options in SPLITS:
            with pytest.raises(CandidError, match=r"are [12] distinct images or series, .*: give at least 6"):
                Monitor(**options).fit(*known, together=together)
    assert (
        "novelty is 50 % instead" in Monitor(score="energy").fit(*known, together=np.zeros(60)).sentences()[0]
    )
    for options in SPLITS:
        assert Monitor(**options).fit(*known, together=np.arange(60) % 6).promises.copies == 54


def test_many_small_groups_have_one_sentence() -> None:
    monitor = Monitor(novelty=0.05).fit(*images(180), by=np.arange(180).clip(140) - 140)
    (sentence,) = [each for each in monitor.sentences() if "groups have" in each]
    assert (
        sentence.startswith("39 of 40 groups have too few held-out images")
        and "('1' 1, '10' 1, '11' 1, …)" in sentence
    )
    assert sum("small groups" in each for each in monitor.sentences()) <= 2


def test_a_score_that_learns_nothing_needs_no_split() -> None:
    monitor, new = fitted(200, score="energy"), images(50, 1)
    assert monitor.promises.n_reference == 200 and monitor.promises.novelty.proven == 0.05
    energy = -np.logaddexp.reduce(images(200).logits, 1)
    own = -np.logaddexp.reduce(new.logits, 1)
    own -= 1e-5 * np.abs(own).clip(1)  # scores that differ by rounding are equal
    assert p_values(monitor, new) == pytest.approx((1 + (energy[:, None] >= own).sum(0)) / 201)


@pytest.mark.parametrize("n", [40, 180])
def test_few_images_give_verdicts_at_stated_levels(n: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        monitor = fitted(n, novelty=0.01)
    novelty = monitor.promises.novelty
    assert monitor.promises.n_reference == n and novelty.in_force == max(0.01, 1 / (n + 1))
    assert novelty.proven == pytest.approx(2 * novelty.in_force + 2 * (1 - novelty.in_force) * 4 / (n + 5))
    assert ("instead of 1 %" in caplog.text) == (n == 40)
    assert "proven is at most" in " ".join(monitor.sentences())
    new, far = images(100, 1), images(20, 2, shift=-8)
    assert {each.verdict for each in monitor.examine(new.logits, new.features)} >= {"accept"}
    assert {each.verdict for each in monitor.examine(far.logits, far.features)} == {"novel"}
    with pytest.raises(CandidError, match="A risk of 1 % can't be promised") as refused:
        fitted(n, risk=0.01)
    assert "takes at least 598 held-out images" in str(refused.value)


def test_advice_of_a_monitor_that_is_followed_works() -> None:
    with pytest.raises(CandidError, match="can't be promised") as refused:
        fitted(180, risk=0.02)
    words = str(refused.value)
    risk = float(words.split("by risk ")[1].split(" ")[0])
    delta = float(words.split("and delta ")[1].split(" ")[0])
    promised = fitted(180, risk=risk, delta=delta).promises.risk
    assert promised is not None and promised.asked == risk and promised.images == 90
    with pytest.raises(CandidError, match="leave risk out"):
        fitted(40, risk=0.02)
    assert fitted(40).promises.risk is None


@pytest.mark.parametrize(("n", "options"), [(500, {}), (500, {"score": "knn"}), (100, {})])
def test_false_alarms_are_at_the_level(n: int, options: dict[str, Any]) -> None:
    """Over many held-out sets, within four standard deviations of the beta-binomial distribution."""
    sets, new = 60, 100
    found = np.array(
        [p_values(fitted(n, 2 * seed, **options), images(new, 2 * seed + 1)) for seed in range(sets)]
    )
    ranked = fitted(n, **options).promises.n_reference
    for level in (0.01, 0.05, 0.1):
        k = int(level * (ranked + 1) + 1e-9)
        rate = k / (ranked + 1)
        variance = rate * (1 - rate) * (new + ranked + 1) / (new * (ranked + 2)) if k else 0
        deviation = 4 * (variance / sets) ** 0.5
        assert abs((found <= level + 1e-9).mean() - rate) <= deviation + (0.02 if n == 100 else 0)


def test_the_rate_with_95_percent_confidence_holds_for_most_monitors() -> None:
    """The energy of logits (a, -50) is -a: the true rate of false alarms is known."""
    random, above = np.random.default_rng(0), 0
    grid = np.linspace(-4, 0, 400)

    def logits(a: np.ndarray) -> np.ndarray:
        return np.stack((a, np.full_like(a, -50)), 1)

    for _ in range(100):
        monitor = Monitor(novelty=0.05, score="energy", novelty_promise="confident")
        monitor.fit(logits(random.normal(size=60)), np.arange(60) % 2)
        novel = [each.verdict == "novel" for each in monitor.examine(logits(grid))]
        above += norm.cdf(grid[novel].max(initial=-9)) > 0.05
    assert 0 < above <= 12  # 5 expected


def test_the_risk_of_the_whole_rule_is_kept() -> None:
    """Labels are drawn from known posteriors, so the true risk of accepted images is known."""
    random, delta, risk, broken, sets = np.random.default_rng(0), 0.2, 0.05, 0, 50

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        logits = random.normal(size=(n, 3)) * 4
        posterior = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        return logits, posterior

    for _ in range(sets):
        known, posterior = draw(600)
        labels = (posterior.cumsum(1) < random.random((600, 1))).sum(1)
        monitor = Monitor(novelty=0.1, error=0.1, risk=risk, delta=delta).fit(known * 2, labels)
        new, posterior = draw(1000)
        accepted = [each.verdict == "accept" for each in monitor.examine(new * 2)]
        broken += (1 - posterior.max(1))[accepted].mean() > risk
    assert broken <= 18  # 10 expected at most, three standard deviations more


@pytest.mark.parametrize("by", ["class", "name"])
def test_levels_hold_within_groups(by: str) -> None:
    known, new = images(600), images(60, 1)
    groups, new_groups = np.repeat(["a", "b"], 300), np.repeat(["b", "a", "c"], 20)
    energy, own = (-np.logaddexp.reduce(each.logits, 1) for each in (known, new))
    if by == "class":
        groups, new_groups = known.logits.argmax(1), new.logits.argmax(1)
    monitor = Monitor(score="energy").fit(
        known.logits, known.labels, by="class" if by == "class" else groups.tolist()
    )
    found = monitor.examine(new.logits, by=None if by == "class" else new_groups)
    for each, group, value in zip(found, new_groups, own, strict=True):
        among = energy if group == "c" else energy[groups == group]
        assert each.p_value == pytest.approx((1 + (among >= value).sum()) / (len(among) + 1))
        assert each.promises is not None and each.promises.n_reference == len(among)


def test_groups_that_are_too_small_are_named_and_the_advice_works(caplog: pytest.LogCaptureFixture) -> None:
    known = images(180)
    groups = ["left"] * 165 + ["right"] * 15
    monitor = Monitor(novelty=0.05).fit(*known, by=groups)
    (sentence,) = [each for each in monitor.sentences() if "Group" in each]
    assert "Group 'right' has 15 held-out images" in sentence and sentence in caplog.text
    novelty, error = (
        float(sentence.split(f"{name} to at least ")[1].split(" ")[0].rstrip("."))
        for name in ("novelty", "error")
    )
    assert novelty == error == 0.063
    monitor = Monitor(novelty, error).fit(*known, by=groups)
    assert not [each for each in monitor.sentences() if "Group" in each]
    new = images(4, 1)
    (*_, last) = monitor.examine(new.logits, new.features, by=["left"] * 3 + ["right"])
    assert last.promises is not None and last.promises.n_reference == 15


SAVED: list[dict[str, Any]] = [
    {},
    {"risk": 0.1, "delta": 0.1},
    {"novelty_promise": "confident", "novelty": 0.1},
    {"score": "vim"},
    {"score": "gen"},
]


@pytest.mark.parametrize("options", SAVED, ids=str)
@pytest.mark.parametrize("n", [180, 600])
def test_a_loaded_monitor_says_the_same(options: dict[str, Any], n: int, tmp_path: Path) -> None:
    known, new = images(n), images(40, 1, shift=0.5)
    by: dict[str, Any] = {"by": ["a", "b"] * (n // 2)} if not options else {}
    monitor = Monitor(**options).fit(*known, class_names=["x", "y", "z"], **by)
    monitor.save(tmp_path / "deep" / "monitor")
    loaded = Monitor.load(tmp_path / "deep" / "monitor")
    asked = {"by": ["a", "b", "c", "a"] * 10} if by else {}
    assert loaded.examine(*new[::2], **asked) == monitor.examine(*new[::2], **asked)
    assert repr(loaded) == repr(monitor) and loaded.sentences() == monitor.sentences()
    assert loaded.false_alarms() == monitor.false_alarms()
    assert list(monitor.false_alarms()) == ["x", "y", "z"]


def test_files_that_were_cut_edited_or_lost_give_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "monitor"
    fitted(60).save(folder)
    fitted(80, risk=None).save(folder)  # replaces the first
    assert len(list(folder.iterdir())) == 2
    (numbers,), record = folder.glob("*.safetensors"), folder / "monitor.json"
    whole, text = numbers.read_bytes(), record.read_text(encoding="utf-8")

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as error:
            Monitor.load(folder)
        assert "\n" not in str(error.value)

    for damaged in (whole[:-1], whole[:100], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], b""):
        numbers.write_bytes(damaged)
        refused("cut or changed since it was saved")
    numbers.unlink()
    refused("missing from")
    numbers.write_bytes(whole)
    assert Monitor.load(folder).promises.n_reference == 80
    for damaged_text, match in (
        (text.replace("0.05", "0.06"), "was edited since"),
        (text[:50], "can't be read as JSON"),
        ("{}", "not written by candid"),
        (text.replace('"format_version": 1', '"format_version": 9'), "has format version 9"),
    ):
        record.write_text(damaged_text, encoding="utf-8")
        refused(match)
    with pytest.raises(CheckpointError, match="There is no monitor.json"):
        Monitor.load(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        fitted(60).save(record)
    with pytest.raises(CandidError, match="call fit first"):
        Monitor().save(folder)


KNOWN = images(60)
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"logits": np.where(KNOWN.logits > 6, np.nan, KNOWN.logits)},
        "logits of .* are NaN or infinite .* image",
    ),
    ({"logits": np.where(KNOWN.logits > 6, np.inf, KNOWN.logits)}, "NaN or infinite"),
    ({"features": np.full((60, 2), np.inf)}, "features of 60 of 60 images are NaN or infinite"),
    ({"logits": np.full((60, 3), 1 / 3)}, "probabilities, not logits"),
    (
        {"logits": KNOWN.logits[:, 0]},
        r"shape \(images, classes\), not \(60,\): of a classifier with a single",
    ),
    ({"logits": KNOWN.logits[:, :1]}, "at least 2 classes"),
    ({"logits": [[1, 2], [3]]}, "must be an array of numbers"),
    ({"logits": [["a", "b"]] * 60}, "must be an array of numbers"),
    ({"labels": KNOWN.labels % 2, "risk": 0.3}, "no held-out image of class '2': give at least one"),
    ({"labels": KNOWN.labels + 1}, "between 0 and 2, .* between 1 and 3"),
    ({"labels": KNOWN.labels - 1}, "between 0 and 2"),
    ({"labels": KNOWN.labels + 0.5}, "must be whole numbers"),
    ({"labels": ["cat"] * 60}, "have 1 names and the logits 3 columns: give class_names"),
    ({"labels": ["cat"] * 60, "class_names": ["bat", "dog", "eel"]}, "label 'cat' is no class name: did you"),
    ({"labels": [("cat", "dog")] * 60}, "one label for each"),
    ({"labels": KNOWN.labels[:59]}, "one label for each of the 60 images"),
    ({"features": KNOWN.features[:59]}, "features of 59 images and logits of 60"),
    ({"features": KNOWN.features[:, 0]}, r"shape \(images, features\)"),
    ({"class_names": ["a", "b"]}, "3 classes but 2 class names"),
    ({"by": ["a"] * 59}, "of each of the 60 images"),
    ({"by": "camera"}, "'by' is"),
    ({"logits": KNOWN.logits[:19], "labels": KNOWN.labels[:19]}, "19 held-out images are too few"),
    ({"novelty": 0.0}, "'novelty' must be above 0"),
    ({"risk": 1.0}, "'risk' must be"),
    ({"novelty_promise": "sure"}, "can't be 'sure'"),
    ({"score": "mahalanobis"}, "needs features"),
    ({"score": "enrgy"}, "did you mean 'energy'"),
]


@pytest.mark.parametrize(("wrong", "match"), BAD, ids=[match[:30] for _, match in BAD])
def test_bad_input_gives_one_sentence(wrong: dict[str, Any], match: str) -> None:
    options = {name: wrong[name] for name in ("novelty", "risk", "novelty_promise", "score") if name in wrong}
    given = {"logits": KNOWN.logits, "labels": KNOWN.labels, **wrong}
    with pytest.raises(CandidError, match=match) as error:
        Monitor(**options).fit(**{name: value for name, value in given.items() if name not in options})
    assert "\n" not in str(error.value)


def test_logits_of_one_image_may_add_up_to_one() -> None:
    known = images(100)
    monitor = Monitor(novelty=0.2, error=0.2).fit(known.logits, known.labels)
    assert len(monitor.examine([[1.0, 0.0, 0.0]])) == 1


def test_probabilities_can_be_used_as_the_error_says() -> None:
    posterior = softmax(KNOWN.logits)
    with pytest.raises(CandidError, match="probabilities, not logits") as error:
        Monitor().fit(posterior, KNOWN.labels)
    code = str(error.value).split("or give ")[-1].rstrip(".")
    logits = eval(code, {"np": np, "probabilities": posterior})
    assert Monitor().fit(logits, KNOWN.labels).examine(logits)[0].posterior["0"] == pytest.approx(
        posterior[0, 0]
    )
    single = KNOWN.logits[:, 0] - 6
    monitor = Monitor().fit(np.stack((0 * single, single), 1), KNOWN.labels == 0)
    assert len(monitor.examine(np.stack((0 * single, single), 1))) == 60


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ((KNOWN.logits,), "fitted to 6 features per image, but given are no features"),
        ((KNOWN.logits, KNOWN.features[:, :5]), "fitted to 6 features per image, but given are 5"),
        ((KNOWN.logits[:, :2], KNOWN.features), "fitted to 3 classes, but these logits have 2"),
        ((KNOWN.logits, KNOWN.features, ["a"] * 60), "fitted without groups"),
        ((KNOWN.logits, KNOWN.features, None, ["a"]), "1 paths and logits of 60 images"),
    ],
)
def test_columns_that_differ_from_those_at_fit_give_one_sentence(
    columns: tuple[Any, ...], match: str
) -> None:
    with pytest.raises(CandidError, match=match):
        fitted(60).examine(*columns)


def test_missing_groups_and_a_missing_fit_give_one_sentence() -> None:
    monitor = Monitor().fit(*KNOWN, by=["a"] * 60)
    with pytest.raises(CandidError, match="fitted with groups"):
        monitor.examine(KNOWN.logits, KNOWN.features)
    with pytest.raises(CandidError, match="call fit first"):
        Monitor().examine(KNOWN.logits)
    with pytest.raises(CandidError, match="fitted to no features, but given are 6"):
        Monitor().fit(*KNOWN[:2]).examine(KNOWN.logits, KNOWN.features)


@settings(max_examples=40, deadline=None)
@given(
    arrays.arrays(np.float32, (30, 3), elements=st.floats(-1e4, 1e4, width=32)),
    arrays.arrays(np.float32, (4, 3), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.floats(0.01, 0.5),
)
def test_any_finite_logits_are_judged(known: np.ndarray, new: np.ndarray, novelty: float) -> None:
    try:
        monitor = Monitor(novelty=novelty).fit(known, np.arange(30) % 3)
    except CandidError as error:
        assert "probabilities" in str(error)
        return
    for each in monitor.examine(new + 1):
        assert each.p_value is not None and each.classes is not None and each.promises is not None
        assert 1 / 31 <= each.p_value <= 1
        assert (each.verdict == "novel") == (each.p_value <= each.promises.novelty.cut)
        assert (each.verdict == "accept") == (len(each.classes) == 1)
        json.dumps(each.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("n", "options"), [(600, {}), (200, {}), (600, {"score": "knn"})])
def test_false_alarms_by_class_add_up_to_the_level(n: int, options: dict[str, Any]) -> None:
    monitor = fitted(n, novelty=0.05, **options)
    flagged, counts = zip(*monitor.false_alarms().values(), strict=True)
    assert sum(counts) == monitor.promises.n_reference
    assert sum(flagged) == pytest.approx(0.05 * sum(counts), abs=2)


def test_the_front_door_has_it() -> None:
    assert candid.Monitor is Monitor and repr(Monitor(risk=0.1)).startswith(
        "Monitor(novelty=None, error=0.05"
    )


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitor.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert "Risk 5 %: at most this share of accepted images is wrong" in capsys.readouterr().out
    assert names["monitor"].promises.risk.asked == 0.05
