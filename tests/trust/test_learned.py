"""Scores of logits and features are those of numpy, scipy and scikit-learn, also on degenerate images."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.special import logsumexp, softmax
from sklearn.covariance import LedoitWolf, ledoit_wolf_shrinkage
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from sklearn.neural_network import MLPClassifier

from candid._support.errors import CandidError
from candid.trust import gaussians
from candid.trust.gaussians import Moments
from candid.trust.learned import LearnedScore, Mahalanobis
from candid.trust.ranking import CombinedRanks, fit_learners
from candid.trust.scores import SCORES
from candid.trust.scores import Columns as AllColumns

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Columns = dict[str, Array]
OF_LOGITS = ("gen", "energy", "max-logit", "max-posterior")
LEARNED = {name: type(score.new_learner()) for name, score in SCORES.items() if score.learns is not None}
every = pytest.mark.parametrize("name", [*LEARNED, *OF_LOGITS])
learned = pytest.mark.parametrize("name", LEARNED)
generator = np.random.default_rng


def images(n: int, features: int = 12, classes: int = 4, seed: int = 0) -> tuple[Columns, Labels]:
    """Features around class means, and logits that are linear in them."""
    random = generator(seed)
    labels = random.integers(classes, size=(n,))
    means = 2 * random.normal(size=(classes, features))
    turn = random.normal(size=(features, features))
    x = means[labels] + 3 + random.normal(size=(n, features)) @ turn / features**0.5
    weight, bias = random.normal(size=(classes, features)), random.normal(size=classes)
    return {"features": x, "logits": x @ weight.T + bias}, labels


def array(columns: Columns, name: str = "features") -> Array:
    return columns[name].astype(np.float64)


def unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def gaussian(x: Array, labels: Labels) -> tuple[Array, Array, Array]:
    """Means of the classes, their shares, and scikit-learn's shrunk covariance around them."""
    y = np.unique(labels, return_inverse=True)[1]
    means = np.stack([x[y == label].mean(0) for label in range(y.max() + 1)])
    covariance = LedoitWolf(assume_centered=True).fit(x - means[y]).covariance_
    return means, np.bincount(y) / len(y), covariance


def plain_mahalanobis(x: Array, labels: Labels, queries: Array) -> Array:
    means, _, covariance = gaussian(x, labels)
    nearest: Array = cdist(queries, means, "mahalanobis", VI=np.linalg.inv(covariance)).min(1)
    return nearest


def plain_relative(x: Array, labels: Labels, queries: Array) -> Array:
    means, shares, within = gaussian(x, labels)
    centre = shares @ means
    total = within + (means - centre).T * shares @ (means - centre)
    to_all: Array = cdist(queries, centre[None], "mahalanobis", VI=np.linalg.inv(total))[:, 0]
    return plain_mahalanobis(x, labels, queries) ** 2 - to_all**2


def plain_vim(columns: Columns, queries: Columns) -> Array:
    """As published, with the last layer from numpy's least squares."""
    x, logits = array(columns), array(columns, "logits")
    solution = np.linalg.lstsq(np.c_[x, np.ones(len(x))], logits, rcond=None)[0]
    weight, bias = solution[:-1], solution[-1]
    origin = -np.linalg.pinv(weight.T) @ bias
    values, vectors = np.linalg.eigh((x - origin).T @ (x - origin) / len(x))
    rest = vectors[:, np.argsort(-values)[x.shape[1] // 2 :]]
    alpha = logits.max(1).mean() / np.linalg.norm((x - origin) @ rest, axis=1).mean()
    residual = np.linalg.norm((array(queries) - origin) @ rest, axis=1)
    found: Array = alpha * residual - logsumexp(array(queries, "logits"), axis=1)
    return found


def plain_pca(x: Array, queries: Array) -> Array:
    fitted = PCA(n_components=0.9, svd_solver="full").fit(x)
    found: Array = np.linalg.norm(queries - fitted.inverse_transform(fitted.transform(queries)), axis=1)
    return found


def plain_knn(x: Array, queries: Array) -> Array:
    found: Array = NearestNeighbors(n_neighbors=10).fit(unit(x)).kneighbors(unit(queries))[0][:, -1]
    return found


def plain(name: str, columns: Columns, labels: Labels, queries: Columns) -> Array:
    x, q, logits = array(columns), array(queries), array(queries, "logits")
    posterior = softmax(logits, axis=1)
    found: dict[str, Any] = {
        "knn": lambda: plain_knn(x, q),
        "mahalanobis": lambda: plain_mahalanobis(x, labels, q),
        "mahalanobis++": lambda: plain_mahalanobis(unit(x), labels, unit(q)),
        "relative-mahalanobis": lambda: plain_relative(x, labels, q),
        "vim": lambda: plain_vim(columns, queries),
        "gen": lambda: (posterior**0.1 * (1 - posterior) ** 0.1).sum(1),
        "energy": lambda: -logsumexp(logits, axis=1),
        "max-logit": lambda: -logits.max(1),
        "max-posterior": lambda: -posterior.max(1),
        "pca-residual": lambda: plain_pca(x, q),
    }
    value: Array = found[name]()
    return value


class OfLogits(LearnedScore):
    """A score of logits, which learns nothing."""

    columns = ("logits",)

    def __init__(self, name: str) -> None:
        self.name = name

    def learn(self, images: gaussians.FitImages) -> "OfLogits":
        return self

    def of(self, columns: Any) -> Array:
        return -SCORES[self.name].of(AllColumns(columns))


def fitted(name: str, columns: Columns, labels: Labels) -> LearnedScore:
    return (OfLogits(name) if name in OF_LOGITS else LEARNED[name]()).fit(columns, labels)


@every
def test_scores_are_the_plain_formulas(name: str) -> None:
    columns, labels = images(300)
    queries, _ = images(50, seed=1)
    found = fitted(name, columns, labels).score(queries)
    assert found.dtype == np.float64 and found.shape == (50,)
    atol = 1e-3 if name == "knn" else 1e-6  # its references are in half precision
    np.testing.assert_allclose(found, plain(name, columns, labels, queries), rtol=1e-4, atol=atol)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(12, 60),
    size=st.integers(1, 20),
    classes=st.integers(1, 6),
    constant=st.booleans(),
    twice=st.booleans(),
)
def test_distances_hold_for_few_constant_and_repeated_images(
    seed: int, n: int, size: int, classes: int, constant: bool, twice: bool
) -> None:
    columns, labels = images(n, size, classes, seed)
    x = columns["features"]
    if constant and size > 1:
        x[:, 0] = 3
    if twice:
        x[n // 2 :], labels[n // 2 :] = x[: n - n // 2].copy(), labels[: n - n // 2].copy()
    labels = 2 * labels + 5  # numbers that are no positions
    queries = np.concatenate((x[:5], x[:3] + 2, np.zeros((1, size))))
    for name, truth in (("mahalanobis", plain_mahalanobis), ("relative-mahalanobis", plain_relative)):
        found = fitted(name, {"features": x}, labels).score({"features": queries})
        expected = truth(x.astype(np.float64), labels, queries.astype(np.float64))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max() + 1e-6)


@pytest.mark.parametrize("n", [5, 40, 500])
def test_the_shrinkage_is_scikit_learns(n: int) -> None:
    columns, labels = images(n, 30)
    x, y = array(columns), labels
    means = np.stack([x[y == label].mean(0) if (y == label).any() else np.zeros(30) for label in range(4)])
    expected = ledoit_wolf_shrinkage(x - means[y], assume_centered=True)
    assert Moments.of(columns["features"], labels).shrinkage == pytest.approx(expected)


DEGENERATE: dict[str, tuple[Columns, Labels]] = {
    "constant features": (
        {"features": np.full((30, 5), 0.3), "logits": np.tile(np.eye(3), (10, 1))},
        np.arange(30) % 3,
    ),
    "nothing but zeros": (
        {"features": np.zeros((30, 5)), "logits": np.zeros((30, 3))},
        np.arange(30) % 3,
    ),
    "one class": (images(30, 5)[0], np.zeros(30, dtype=np.int64)),
    "one image": (images(1, 5)[0], np.zeros(1, dtype=np.int64)),
    "one image a class": (images(20, 5)[0], np.arange(20)),
    "one feature": images(30, 1),
    "fewer images than features": images(10, 40),
    "repeated images": (
        {key: value[:1].repeat(30, 0) for key, value in images(9, 5)[0].items()},
        np.arange(30) % 3,
    ),
}


@every
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_images_have_finite_scores_and_far_ones_no_lower(name: str, kind: str) -> None:
    columns, labels = DEGENERATE[kind]
    score = fitted(name, columns, labels)
    far = {
        "features": columns["features"] + 100 * np.eye(columns["features"].shape[1])[0],
        "logits": columns["logits"],
    }
    near, out = score.score(columns), score.score(far)
    assert np.isfinite(near).all() and np.isfinite(out).all()
    # one feature of length 1 has no place to go, and the relative distance only looks along the class means
    if "features" in score.columns and kind != "one feature" and name != "relative-mahalanobis":
        assert out.mean() >= near.mean()


@learned
def test_a_saved_score_comes_back(name: str) -> None:
    columns, labels = images(200)
    score = fitted(name, columns, labels)
    state = score.state()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    again = LEARNED[name].from_state(state)
    assert np.array_equal(again.score(columns), score.score(columns))


@every
def test_parts_of_the_images_have_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, labels = images(50)
    score = fitted(name, columns, labels)
    whole = score.score(columns)
    one = np.concatenate(
        [score.score({key: value[i : i + 1] for key, value in columns.items()}) for i in range(50)]
    )
    np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(gaussians, "ROWS", 7)
    np.testing.assert_allclose(fitted(name, columns, labels).score(columns), whole, rtol=1e-5, atol=1e-5)
    assert score.score({key: value[:0] for key, value in columns.items()}).shape == (0,)


@every
def test_ties_stay_ties(name: str) -> None:
    columns, labels = images(60)
    pairs = {key: value[:20].repeat(2, 0) for key, value in columns.items()}
    found = fitted(name, columns, labels).score(pairs).reshape(20, 2)
    np.testing.assert_allclose(found[:, 0], found[:, 1], rtol=1e-9, atol=1e-9)


def fitted_together(columns: Columns, labels: Labels) -> dict[str, LearnedScore]:
    return fit_learners([SCORES[name] for name in LEARNED], AllColumns(columns, labels))


def test_scores_fitted_together_are_those_fitted_alone() -> None:
    columns, labels = images(200)
    for name, score in fitted_together(columns, labels).items():
        np.testing.assert_allclose(
            score.score(columns), fitted(name, columns, labels).score(columns), rtol=1e-7, atol=1e-9
        )


def test_many_images_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussians, "MOST_FITTED", 100)
    columns, labels = images(298)
    every_third = {key: value[::3] for key, value in columns.items()}
    found = fitted("mahalanobis", columns, labels).score(columns)
    assert np.array_equal(found, fitted("mahalanobis", every_third, labels[::3]).score(columns))


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_far_features_keep_their_distances(offset: float) -> None:
    x = generator(0).normal(size=(400, 64)) + offset
    labels = np.arange(400) % 40
    found = fitted("mahalanobis", {"features": x}, labels).score({"features": x})
    expected = plain_mahalanobis(x.astype(np.float64), labels, x.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_state_of_earlier_versions_loads() -> None:
    columns, labels = images(100)
    score = Mahalanobis().fit(columns, labels)
    means = score.means + score.centre.astype(np.float32) @ score.whitening.T
    old = Mahalanobis.from_state({"whitening": score.whitening, "means": means})
    np.testing.assert_allclose(old.score(columns), score.score(columns), rtol=1e-4, atol=1e-4)


def test_what_a_model_saves_is_small() -> None:
    """The bundled ResNets have 384 features and 1000 held-out images, of which some 20 numbers are kept."""
    columns, labels = images(2000, 384, 10)
    states = [score.state() for score in fitted_together(columns, labels).values()]
    size = sum(part.nbytes for state in states for part in state.values())
    assert size + 1000 * 20 * 8 < 1.8e6


def test_wrong_columns_are_refused_in_one_sentence() -> None:
    columns, labels = images(20)
    score = fitted("mahalanobis", columns, labels)
    with pytest.raises(CandidError, match="needs the column 'features': only logits are given"):
        score.score({"logits": columns["logits"]})
    with pytest.raises(CandidError, match=r"must have floats in the shape .* not int64"):
        score.score({"features": np.zeros((3, 12), dtype=np.int64)})
    with pytest.raises(CandidError, match="one row for each image"):
        fitted("vim", {**columns, "logits": columns["logits"][:5]}, labels)
    with pytest.raises(CandidError, match="'features' of 20 of 20 images is not finite"):
        fitted("knn", {"features": columns["features"] * np.nan}, labels)
    with pytest.raises(CandidError, match="one label each"):
        fitted("knn", columns, labels[:3])


def test_scores_need_what_they_learn_from() -> None:
    assert all(set(LEARNED[name].columns) == set(SCORES[name].columns) for name in LEARNED)


@cache
def digits() -> tuple[dict[str, Columns], Labels]:
    """Columns of a small classifier of the digits 0 to 6; 7, 8 and 9 are foreign."""
    order = np.random.default_rng(0).permutation(1797)  # writers come one after the other
    pixels, labels = (part[order] for part in load_digits(return_X_y=True))
    known = labels < 7
    net = MLPClassifier((32,), random_state=0, learning_rate_init=0.01)
    x, y = pixels[known] / 16, labels[known]
    for _ in range(40):
        net.partial_fit(x[:600], y[:600], classes=range(7))

    def columns(part: Array) -> Columns:
        features = np.maximum(part @ net.coefs_[0] + net.intercepts_[0], 0)
        logits = features @ net.coefs_[1] + net.intercepts_[1]
        return {
            "features": np.asarray(features).astype(np.float16),
            "logits": np.asarray(logits).astype(np.float32),
        }

    sets = {"train": x[:600], "held out": x[600:900], "new": x[900:], "foreign": pixels[~known] / 16}
    return {name: columns(part) for name, part in sets.items()}, np.asarray(y[:600])


AUROC = {
    "knn": 0.943,
    "mahalanobis": 0.924,
    "mahalanobis++": 0.954,
    "relative-mahalanobis": 0.957,
    "vim": 0.960,
    "gen": 0.973,
    "energy": 0.962,
    "max-logit": 0.965,
    "max-posterior": 0.964,
    "pca-residual": 0.781,
    "combined": 0.959,
}
"""As measured when the scores were written."""


@every
def test_unknown_digits_are_found_as_well_as_before(name: str) -> None:
    sets, labels = digits()
    score = fitted(name, sets["train"], labels)
    inside, outside = score.score(sets["new"]), score.score(sets["foreign"])
    found = roc_auc_score([0] * len(inside) + [1] * len(outside), np.concatenate((inside, outside)))
    assert found == pytest.approx(AUROC[name], abs=0.02)


def test_combined_finds_unknown_digits_and_keeps_its_level() -> None:
    sets, labels = digits()
    parts = [fitted(name, sets["train"], labels) for name in SCORES["combined"].parts(sets["train"])]
    scores = {name: np.stack([part.score(each) for part in parts], 1) for name, each in sets.items()}
    ranks = CombinedRanks(scores["held out"])
    assert (ranks.p_values(scores["new"]) <= 0.05).mean() < 0.1
    inside, outside = ranks.statistic(scores["new"]), ranks.statistic(scores["foreign"])
    found = roc_auc_score([0] * len(inside) + [1] * len(outside), np.concatenate((inside, outside)))
    assert found == pytest.approx(AUROC["combined"], abs=0.02)
