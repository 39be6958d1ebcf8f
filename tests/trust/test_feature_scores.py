"""Scores of logits and features are those of numpy, scipy and scikit-learn, also on degenerate images."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
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
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.randomness import generator
from candid.models.protocol import Outputs
from candid.trust import feature_moments, feature_scores
from candid.trust.combined import CombinedRanks, parts_for
from candid.trust.feature_moments import Moments
from candid.trust.feature_scores import COLUMN_SCORES, ColumnScore, Mahalanobis, fit_scores
from candid.trust.scores import FITTED_SCORES, SCORES

Array = NDArray[np.float64]
Columns = dict[str, Tensor]
every = pytest.mark.parametrize("name", COLUMN_SCORES)


def images(n: int, features: int = 12, classes: int = 4, seed: int = 0) -> tuple[Columns, Tensor]:
    """Features around class means, and logits that are linear in them."""
    random = generator(seed)
    labels = torch.randint(classes, (n,), generator=random)
    means = 2 * torch.randn(classes, features, generator=random)
    turn = torch.randn(features, features, generator=random)
    x = means[labels] + 3 + torch.randn(n, features, generator=random) @ turn / features**0.5
    weight, bias = torch.randn(classes, features, generator=random), torch.randn(classes, generator=random)
    return {"features": x, "logits": x @ weight.T + bias}, labels


def array(columns: Columns, name: str = "features") -> Array:
    return columns[name].double().numpy()


def unit(x: Array) -> Array:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def gaussian(x: Array, labels: Tensor) -> tuple[Array, Array, Array]:
    """Means of the classes, their shares, and scikit-learn's shrunk covariance around them."""
    y = np.unique(labels.numpy(), return_inverse=True)[1]
    means = np.stack([x[y == label].mean(0) for label in range(y.max() + 1)])
    covariance = LedoitWolf(assume_centered=True).fit(x - means[y]).covariance_
    return means, np.bincount(y) / len(y), covariance


def plain_mahalanobis(x: Array, labels: Tensor, queries: Array) -> Array:
    means, _, covariance = gaussian(x, labels)
    nearest: Array = cdist(queries, means, "mahalanobis", VI=np.linalg.inv(covariance)).min(1)
    return nearest


def plain_relative(x: Array, labels: Tensor, queries: Array) -> Array:
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


def plain(name: str, columns: Columns, labels: Tensor, queries: Columns) -> Array:
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


def fitted(name: str, columns: Columns, labels: Tensor) -> ColumnScore:
    return COLUMN_SCORES[name]().fit(columns, labels)


@every
def test_scores_are_the_plain_formulas(name: str) -> None:
    columns, labels = images(300)
    queries, _ = images(50, seed=1)
    found = fitted(name, columns, labels).score(queries)
    assert found.dtype == torch.float64 and found.shape == (50,)
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
        x[n // 2 :], labels[n // 2 :] = x[: n - n // 2].clone(), labels[: n - n // 2].clone()
    labels = 2 * labels + 5  # numbers that are no positions
    queries = torch.cat((x[:5], x[:3] + 2, torch.zeros(1, size)))
    for name, truth in (("mahalanobis", plain_mahalanobis), ("relative-mahalanobis", plain_relative)):
        found = fitted(name, {"features": x}, labels).score({"features": queries})
        expected = truth(x.double().numpy(), labels, queries.double().numpy())
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max() + 1e-6)


@pytest.mark.parametrize("n", [5, 40, 500])
def test_the_shrinkage_is_scikit_learns(n: int) -> None:
    columns, labels = images(n, 30)
    x, y = array(columns), labels.numpy()
    means = np.stack([x[y == label].mean(0) if (y == label).any() else np.zeros(30) for label in range(4)])
    expected = ledoit_wolf_shrinkage(x - means[y], assume_centered=True)
    assert Moments.of(columns["features"], labels).shrinkage == pytest.approx(expected)


DEGENERATE: dict[str, tuple[Columns, Tensor]] = {
    "constant features": (
        {"features": torch.full((30, 5), 0.3), "logits": torch.eye(3).repeat(10, 1)},
        torch.arange(30) % 3,
    ),
    "nothing but zeros": (
        {"features": torch.zeros(30, 5), "logits": torch.zeros(30, 3)},
        torch.arange(30) % 3,
    ),
    "one class": (images(30, 5)[0], torch.zeros(30, dtype=torch.long)),
    "one image": (images(1, 5)[0], torch.zeros(1, dtype=torch.long)),
    "one image a class": (images(20, 5)[0], torch.arange(20)),
    "one feature": images(30, 1),
    "fewer images than features": images(10, 40),
    "repeated images": (
        {key: value[:1].repeat(30, 1) for key, value in images(9, 5)[0].items()},
        torch.arange(30) % 3,
    ),
}


@every
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_images_have_finite_scores_and_far_ones_no_lower(name: str, kind: str) -> None:
    columns, labels = DEGENERATE[kind]
    score = fitted(name, columns, labels)
    far = {
        "features": columns["features"] + 100 * torch.eye(columns["features"].shape[1])[0],
        "logits": columns["logits"],
    }
    near, out = score.score(columns), score.score(far)
    assert near.isfinite().all() and out.isfinite().all()
    # one feature of length 1 has no place to go, and the relative distance only looks along the class means
    if "features" in score.columns and kind != "one feature" and name != "relative-mahalanobis":
        assert out.mean() >= near.mean()


@every
def test_a_saved_score_comes_back(name: str) -> None:
    columns, labels = images(200)
    score = fitted(name, columns, labels)
    state = score.state()
    assert all(isinstance(value, Tensor) for value in state.values())
    again = COLUMN_SCORES[name].from_state(state)
    assert torch.equal(again.score(columns), score.score(columns))


@every
def test_parts_of_the_images_have_the_same_scores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, labels = images(50)
    score = fitted(name, columns, labels)
    whole = score.score(columns)
    one = torch.cat(
        [score.score({key: value[i : i + 1] for key, value in columns.items()}) for i in range(50)]
    )
    torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)
    for module in (feature_moments, feature_scores):
        monkeypatch.setattr(module, "ROWS", 7)
    torch.testing.assert_close(fitted(name, columns, labels).score(columns), whole, rtol=1e-5, atol=1e-5)
    assert score.score({key: value[:0] for key, value in columns.items()}).shape == (0,)


@every
def test_ties_stay_ties(name: str) -> None:
    columns, labels = images(60)
    pairs = {key: value[:20].repeat_interleave(2, 0) for key, value in columns.items()}
    found = fitted(name, columns, labels).score(pairs).view(20, 2)
    torch.testing.assert_close(found[:, 0], found[:, 1], rtol=1e-9, atol=1e-9)


@every
def test_a_measure_of_a_batch_is_the_score_of_its_columns(name: str) -> None:
    columns, labels = images(100)
    score = fitted(name, columns, labels)
    outputs = Outputs(columns["logits"], columns["features"], None, None)
    halved = {**columns, "features": columns["features"].half()}
    assert torch.equal(score(torch.empty(0), outputs), score.score(halved))


def test_scores_fitted_together_are_those_fitted_alone() -> None:
    columns, labels = images(200)
    for name, score in fit_scores(COLUMN_SCORES, columns, labels).items():
        torch.testing.assert_close(score.score(columns), fitted(name, columns, labels).score(columns))


def test_many_images_are_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_moments, "MOST_FITTED", 100)
    columns, labels = images(298)
    every_third = {key: value[::3] for key, value in columns.items()}
    found = fitted("mahalanobis", columns, labels).score(columns)
    assert torch.equal(found, fitted("mahalanobis", every_third, labels[::3]).score(columns))


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_far_features_keep_their_distances(offset: float) -> None:
    x = torch.randn(400, 64, generator=generator(0)) + offset
    labels = torch.arange(400) % 40
    found = fitted("mahalanobis", {"features": x}, labels).score({"features": x})
    expected = plain_mahalanobis(x.double().numpy(), labels, x.double().numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_state_of_earlier_versions_loads() -> None:
    columns, labels = images(100)
    score = Mahalanobis().fit(columns, labels)
    means = score.means + score.centre.float() @ score.whitening.T
    old = Mahalanobis.from_state({"whitening": score.whitening, "means": means})
    torch.testing.assert_close(old.score(columns), score.score(columns), rtol=1e-4, atol=1e-4)


def test_what_a_model_saves_is_small() -> None:
    """The bundled ResNets have 384 features and 1000 held-out images, of which some 20 numbers are kept."""
    columns, labels = images(2000, 384, 10)
    states = [score.state() for score in fit_scores(FITTED_SCORES, columns, labels).values()]
    size = sum(part.nbytes for state in states for part in state.values())
    assert size + 1000 * 20 * 8 < 1.8e6


def test_wrong_columns_are_refused_in_one_sentence() -> None:
    columns, labels = images(20)
    score = fitted("mahalanobis", columns, labels)
    with pytest.raises(CandidError, match="needs the column 'features': only logits are given"):
        score.score({"logits": columns["logits"]})
    with pytest.raises(CandidError, match=r"must have floats in the shape .* not torch.int64"):
        score.score({"features": torch.zeros(3, 12, dtype=torch.long)})
    with pytest.raises(CandidError, match="one row for each image"):
        fitted("vim", {**columns, "logits": columns["logits"][:5]}, labels)
    with pytest.raises(CandidError, match="'features' of 20 of 20 images is not finite"):
        fitted("knn", {"features": columns["features"] * torch.nan}, labels)
    with pytest.raises(CandidError, match="one label each"):
        fitted("knn", columns, labels[:3])
    with pytest.raises(CandidError, match="no score 'knm': did you mean 'knn'"):
        fit_scores(["knm"], columns, labels)


def test_every_score_of_columns_is_offered_for_models() -> None:
    assert COLUMN_SCORES.keys() <= SCORES.keys()
    assert set(FITTED_SCORES) == {name for name, kind in COLUMN_SCORES.items() if "features" in kind.columns}


@cache
def digits() -> tuple[dict[str, Columns], Tensor]:
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
        return {"features": torch.from_numpy(features).half(), "logits": torch.from_numpy(logits).float()}

    sets = {"train": x[:600], "held out": x[600:900], "new": x[900:], "foreign": pixels[~known] / 16}
    return {name: columns(part) for name, part in sets.items()}, torch.from_numpy(y[:600])


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
    found = roc_auc_score([0] * len(inside) + [1] * len(outside), torch.cat((inside, outside)))
    assert found == pytest.approx(AUROC[name], abs=0.02)


def test_combined_finds_unknown_digits_and_keeps_its_level() -> None:
    sets, labels = digits()
    parts = fit_scores(parts_for(sets["train"]), sets["train"], labels).values()
    scores = {name: torch.stack([part.score(each) for part in parts], 1) for name, each in sets.items()}
    ranks = CombinedRanks.fit(scores["held out"])
    assert (ranks.p_values(scores["new"]) <= 0.05).double().mean() < 0.1
    inside, outside = ranks.statistic(scores["new"]), ranks.statistic(scores["foreign"])
    found = roc_auc_score([0] * len(inside) + [1] * len(outside), torch.cat((inside, outside)))
    assert found == pytest.approx(AUROC["combined"], abs=0.02)
