"""A monitor as users of scikit-learn expect it: arrays out, probabilities in, clones, searches, checks."""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from candid import CandidError, Monitor, Watch
from candid._support.numbers import softmax
from tests.trust.test_monitor import images

KNOWN, NEW = images(600), images(50, 1)
FAR = images(20, 2, shift=-6)
NAMES = np.array(["ant", "bee", "cat"])


def test_predictions_are_arrays_and_say_what_examine_says() -> None:
    monitor = Monitor().fit(KNOWN.logits, NAMES[KNOWN.labels], KNOWN.features)
    arrays = np.concatenate((NEW.logits, FAR.logits)), np.concatenate((NEW.features, FAR.features))
    examinations = monitor.examine(*arrays)
    assert monitor.verdicts(*arrays).tolist() == [each.verdict for each in examinations]
    assert monitor.predict_p(*arrays).tolist() == [each.p_value for each in examinations]
    predicted = monitor.predict(*arrays)
    assert {"novel", *NAMES} == set(predicted.tolist())
    assert [label == "novel" for label in predicted] == [each.verdict == "novel" for each in examinations]
    sets = monitor.predict_set(*arrays)
    assert sets.shape == (70, 3) and monitor.classes_.tolist() == NAMES.tolist()
    assert [set(NAMES[row]) for row in sets] == [set(each.classes or ()) for each in examinations]
    assert (monitor.score_samples(*arrays) == -monitor.scores(*arrays)).all()
    assert monitor.score_samples(*arrays)[:50].mean() > monitor.score_samples(*arrays)[50:].mean()


def test_a_single_image_needs_no_second_axis() -> None:
    monitor = Monitor().fit(*KNOWN)
    assert monitor.examine(NEW.logits[0], NEW.features[0])[0].p_value == monitor.predict_p(*NEW[::2])[0]
    assert Monitor().fit(*KNOWN[:2]).predict(NEW.logits[3].tolist()).shape == (1,)


def test_probabilities_and_log_probabilities_with_zeros_give_the_same(tmp_path: Any) -> None:
    forest = RandomForestClassifier(20, random_state=0).fit(KNOWN.features, KNOWN.labels)
    held_out, new = images(400, 3), images(60, 4)
    probabilities = forest.predict_proba(held_out.features)
    assert (probabilities == 0).any()
    asked = Monitor(from_probabilities=True).fit(probabilities, held_out.labels)
    expected = asked.predict_p(forest.predict_proba(new.features))
    with np.errstate(divide="ignore"):
        logarithms = Monitor().fit(np.log(probabilities), held_out.labels)
        assert np.allclose(logarithms.predict_p(np.log(forest.predict_proba(new.features))), expected)
    asked.save(tmp_path)
    loaded = Monitor.load(tmp_path)
    assert loaded.from_probabilities and repr(loaded) == repr(asked)
    assert (loaded.predict_p(forest.predict_proba(new.features)) == expected).all()
    with pytest.raises(CandidError, match="These are no probabilities"):
        asked.predict(held_out.logits)


def test_classes_without_held_out_images_are_named_and_hardly_ruled_out(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = KNOWN.labels != 2
    known = KNOWN.logits[rows], KNOWN.labels[rows], KNOWN.features[rows]
    monitor = Monitor().fit(*known, class_names=list(NAMES))
    (sentence,) = [line for line in monitor.sentences() if "without held-out images" in line]
    assert sentence.startswith("1 class without held-out images ('cat')") and sentence in caplog.text
    posterior, named = softmax(KNOWN.logits), monitor.fitted.rule.named(softmax(KNOWN.logits))
    ratio = posterior[:, 2] / posterior.max(1)
    assert (named[:, 2] >= (ratio >= 1 / 401)).all() and not named[ratio < 1e-3, 2].any()
    assert named[:, 2].sum() > Monitor().fit(*KNOWN).fitted.rule.named(posterior)[:, 2].sum()
    assert "accept" in monitor.verdicts(known[0], known[2])
    monitor.save(tmp_path)
    loaded = Monitor.load(tmp_path)
    assert loaded.sentences() == monitor.sentences()
    assert (loaded.predict_set(*NEW[::2]) == monitor.predict_set(*NEW[::2])).all()


def test_clones_and_parameters() -> None:
    monitor = Monitor(novelty=0.1, score="energy").fit(KNOWN.logits, KNOWN.labels)
    copied = clone(monitor)
    assert copied.get_params() == monitor.get_params() and not hasattr(copied, "classes_")
    assert monitor.n_features_in_ == 3
    assert copied.set_params(novelty=None, fdr=0.2) is copied
    assert repr(copied).startswith("Monitor(novelty=None") and copied.levels.fdr == 0.2
    assert (
        pickle.loads(pickle.dumps(monitor)).predict(NEW.logits).tolist()
        == monitor.predict(NEW.logits).tolist()
    )
    with pytest.raises(CandidError, match="no parameter 'novelti': did you mean 'novelty'"):
        monitor.set_params(novelti=0.1)


def test_a_grid_search_chooses_a_level() -> None:
    def right(monitor: Monitor, logits: Any, labels: Any) -> float:
        return float((monitor.predict(logits) == labels.astype(str)).mean())

    grid = {"novelty": [0.3, 0.05], "score": ["energy"]}
    search = GridSearchCV(Monitor(), grid, cv=2, scoring=right).fit(KNOWN.logits, KNOWN.labels)
    assert search.best_params_ == {"novelty": 0.05, "score": "energy"}


def test_a_watch_says_that_there_is_drift() -> None:
    random = np.random.default_rng(0)
    watch = Watch().fit(random.normal(size=500))
    assert not watch.update(random.normal(size=50)).drift_detected
    assert watch.update(3 + random.normal(size=50)).drift_detected and watch.alarm


LOGITS = "its input are logits with a column for each class, not features of any number"
TEXT = 'predictions are text (a class or "novel"), which this check subtracts from each other'
WORDS = "the error is one sentence of Candid that says what to do, in other words than scikit-learn's"
NUMBERS = "a single row of as many numbers as there are classes is one image"
EXPECTED = {
    "check_fit_score_takes_y": "the arguments of fit are called logits and labels",
    "check_estimators_overwrite_params": LOGITS,
    "check_estimators_fit_returns_self": LOGITS,
    "check_readonly_memmap_input": LOGITS,
    "check_estimators_unfitted": "NotFittedError is scikit-learn's: ours is a ValueError",
    "check_n_features_in_after_fitting": "fewer than 20 images are refused",
    "check_estimators_nan_inf": "fewer than 20 images are refused",
    "check_fit2d_1sample": WORDS,
    "check_fit2d_1feature": WORDS,
    "check_complex_data": WORDS,
    "check_dtype_object": WORDS,
    "check_estimators_empty_data_messages": WORDS,
    "check_estimator_sparse_tag": WORDS,
    "check_estimator_sparse_array": WORDS,
    "check_estimator_sparse_matrix": WORDS,
    "check_requires_y_none": WORDS,
    "check_pipeline_consistency": "'score' names a parameter, the score that decides what is novel",
    "check_estimators_pickle": TEXT,
    "check_methods_sample_order_invariance": TEXT,
    "check_methods_subset_invariance": TEXT,
    "check_fit_idempotent": TEXT,
    "check_fit2d_predict1d": NUMBERS,
}
"""The checks of scikit-learn that a monitor does not pass, and why."""


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it does not inherit from BaseEstimator
    CHECKS = parametrize_with_checks([Monitor()], expected_failed_checks=lambda _: EXPECTED)


@pytest.mark.filterwarnings("ignore")
@CHECKS  # type: ignore[untyped-decorator]
def test_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)
