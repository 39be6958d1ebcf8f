"""The rule of a model promises the risk of its whole rule, and says what is in force."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import candid
from candid import CandidError, ResNet
from candid.judging.held_out import HeldOut, needed
from candid.trust.conformal import shuffled_halves
from candid.trust.promises import Levels, walk
from candid.trust.ranking import ALL
from candid.trust.scores import Columns
from candid.trust.verdict import NoveltyPromise
from tests.helpers import candid_command

MODEL = "cifar10-resnet"


@pytest.fixture(scope="module")
def model() -> ResNet:
    return candid.load(MODEL)


def test_one_half_fixes_the_rule_and_the_other_tests_it(model: ResNet) -> None:
    held_out = needed(model)
    rule = held_out.rule(Levels(risk=0.05))
    fixing, testing = (held_out.rows(half) for half in shuffled_halves(len(held_out)))
    assert len(fixing) == len(testing) == 500
    assert not set(fixing.statistics["keys"].tolist()) & set(testing.statistics["keys"].tolist())
    without = fixing.rule()
    risk = rule.promises[ALL].risk
    assert replace(rule.promises[ALL], risk=None) == without.promises[ALL]
    assert risk is not None and risk.images == 500 and risk.asked == 0.05
    columns = testing.statistics
    fixed = fixing.statistics["true_posterior"] / fixing.statistics["max_posterior"]
    ruled_out = 1 + (fixed[:, None] <= columns["second_posterior"] / columns["max_posterior"]).sum(0)
    passed = (ruled_out / 501 <= 0.05) & (without.p_values(columns) > 0.05)
    passed &= columns["max_posterior"] >= 0.8
    wrong = columns["true_posterior"] < columns["max_posterior"]
    assert risk == walk(columns["max_posterior"][passed], wrong[passed], 0.05, images=500)


def test_without_the_second_posterior_the_promise_is_weaker(model: ResNet) -> None:
    """Models of earlier versions did not store it: 1 - confidence is an upper bound."""
    held_out = needed(model)
    older = Columns({name: v for name, v in held_out.statistics.items() if name != "second_posterior"})
    own, bound = (
        each.rule(Levels(risk=0.1)).promises[ALL].risk
        for each in (held_out, replace(held_out, statistics=older, fits={}))
    )
    assert own is not None and bound is not None and bound.coverage < own.coverage


def test_accepted_images_are_confident_enough(model: ResNet) -> None:
    images = np.random.default_rng(0).random((40, 32, 32, 3))
    for each in candid.examine(model, images, risk=0.1, novelty=0.05, score="max-posterior"):
        assert each.promises is not None and each.promises.risk is not None
        if each.verdict == "accept":
            assert each.confidence >= each.promises.risk.threshold
        elif each.verdict == "ambiguous":
            assert each.classes is not None and len(each.classes) >= 2 and each.classes[0] == each.label


def test_advice_that_is_followed_works(model: ResNet) -> None:
    held_out = needed(model)
    with pytest.raises(CandidError, match="A risk of 1 % can't be promised") as refused:
        held_out.rule(Levels(risk=0.01))
    words = str(refused.value)
    risk = float(words.split("by risk ")[1].split(" ")[0])
    delta = float(words.split("and delta ")[1].split(" ")[0])
    assert held_out.rule(Levels(risk=risk, delta=delta)).promises[ALL].risk is not None
    promises: tuple[NoveltyPromise, ...] = ("average", "confident")
    for promise in promises:
        with pytest.raises(CandidError, match="raise --novelty to ") as refused:
            held_out.rule(Levels(novelty=1e-4, novelty_promise=promise))
        smallest = float(str(refused.value).split("raise --novelty to ")[1].rstrip("."))
        levels = Levels(novelty=smallest, novelty_promise=promise)
        assert held_out.rule(levels).promises[ALL].novelty.in_force == smallest
    few = HeldOut(held_out.statistics.rows(slice(30)), 1.0)
    with pytest.raises(CandidError, match="raise the level to") as refused:
        few.rule(Levels(error=0.01))
    smallest = float(str(refused.value).split("raise the level to ")[1].rstrip("."))
    assert few.rule(Levels(error=smallest)).promises[ALL].error.in_force == smallest


def test_false_alarms_add_up_to_the_level() -> None:
    for name in ("cifar10-beta1", MODEL):
        model = candid.load(name)
        rule = needed(model).rule(Levels(novelty=0.05))
        alarms = rule.false_alarms(model.class_names)
        assert list(alarms) == list(model.class_names)
        n = rule.promises[ALL].n_reference
        assert sum(images for _, images in alarms.values()) == n
        assert sum(flagged for flagged, _ in alarms.values()) == pytest.approx(0.05 * n, abs=1)


def test_the_command_prints_the_promises(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    options = ("--risk", "0.1", "--delta", "0.02", "--novelty", "0.02", "--novelty-promise", "confident")
    done = candid_command("examine", MODEL, tmp_path / "black.png", *options, "--json")
    assert done.exit_code == 0
    said = " ".join(done.stderr.split())
    promises = json.loads(done.stdout)["promises"]
    assert said.startswith(promises["plain"])
    assert promises["plain"] == (
        "Of ordinary photos, at most 2 % are called novel, with 95 % confidence, and at most 5 % get an "
        "answer without their true class, on average. At most 10 % of the accepted answers are wrong, with "
        "98 % confidence."
    )
    assert promises["risk"]["asked"] == 0.1 and promises["risk"]["delta"] == 0.02
    done = candid_command("examine", MODEL, tmp_path / "black.png", *options, "--json", "--verbose")
    said = " ".join(done.stderr.split())
    assert all(sentence in said for sentence in promises["sentences"])
    assert "Novelty 2 %: at most this share of ordinary images is called novel, with 95 % confidence" in said
    assert (
        "Error 5 %" in said and "Risk 10 %: at most this share of accepted images is wrong, with 98 %" in said
    )
    done = candid_command("examine", MODEL, tmp_path / "black.png", "--risk", "0.01")
    assert isinstance(done.exception, CandidError) and "can't be promised" in str(done.exception)
