"""The decision plane: the means of a few classes in a plane, where all that decides between them is seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, log_softmax, logsumexp, softmax
from candid._support.randomness import seed_of
from candid.models.protocol import Model, require

MASS = 0.9
"""Share of the mixture that its drawn region holds."""
FEWEST_FITTED, MOST_FITTED = 3, 12
"""Classes in the plane of a model that is not fine-tuned."""
DENSITY, RESTARTS = 0.3, 8
"""Weight of the density where a plane is fitted, and random planes that the search starts from."""


@dataclass(frozen=True)
class DecisionPlane:
    """The plane of the means with lengths as in latent space; all arrays in float64.

    The first axis is the one along which the means lie furthest apart. What a latent has beyond the plane is
    the same for every class, so two numbers decide, and the cell of a class is a polygon::

        |z - mu_y|^2 = |p(z) - m_y|^2 + (distance of z to the plane)^2
    """

    class_names: tuple[str, ...]
    origin: Array
    """The average of the means, (D,): the point (0, 0)."""
    axes: Array
    """Orthonormal, (2, D); those of a fitted plane also scale."""
    means: Array
    """m_y, (M, 2), in standard deviations of a class."""
    log_priors: Array
    """log p(y), (M,)."""

    def project(self, z: Array) -> Array:
        """p(z), the place of each latent (N, D) in the plane, in standard deviations, (N, 2)."""
        return (np.asarray(z, np.float64) - self.origin) @ self.axes.T

    def logits(self, points: Array) -> Array:
        """``p . m_y - |m_y|^2 / 2 + log p(y)`` of the points (N, 2), (N, M): log p(y | z) but a constant."""
        points = np.asarray(points, np.float64)
        return points @ self.means.T - 0.5 * np.square(self.means).sum(1) + self.log_priors

    def posterior(self, points: Array) -> Array:
        """p(y | z) of every latent above the points (N, 2), (N, M); the model's own, exactly."""
        return softmax(self.logits(points))

    def log_density(self, points: Array) -> Array:
        """Log of the mixture's density in the plane, sum_y p(y) N(p; m_y, 1), in nats, (N,)."""
        squares = np.square(np.asarray(points, np.float64)).sum(1)
        return logsumexp(self.logits(points)) - 0.5 * squares - math.log(2 * math.pi)

    def threshold(self) -> float:
        """The log density above which :data:`MASS` of the mixture lies, from draws."""
        random = np.random.default_rng(seed_of(len(self.means)))
        labels = random.choice(len(self.means), 20_000, p=softmax(self.log_priors))
        drawn = self.means[labels] + random.standard_normal((len(labels), 2))
        return float(np.quantile(self.log_density(drawn), 1 - MASS))

    def inside(self, points: Array) -> Array:
        """Whether points (N, 2) lie in the region of highest density that holds :data:`MASS`, (N,)."""
        return np.asarray(self.log_density(points) >= self.threshold())


def decision_plane(model: Model) -> DecisionPlane:
    """The plane that the means of a planar model lie in.

    >>> import candid
    >>> from candid.models.flow.means import planar_model
    >>> plane = decision_plane(planar_model(candid.GenerativeClassifier.from_preset("digits"), [7, 1, 3]))
    >>> plane.project(np.zeros((5, 64))).shape, plane.means.shape
    ((5, 2), (3, 2))
    """
    require(model, "invert", "A decision plane")
    if not model.geometry.planar:
        raise CandidError("The means of this model lie in no plane: choose classes and fit one first.")
    prototypes = model.state()["mixture.prototypes"].astype(np.float64)  # the origin, and two directions
    means = model.geometry.means()
    origin = means.mean(0)
    axes = np.linalg.qr(prototypes[1:].T).Q.T
    turn = np.linalg.svd((means - origin) @ axes.T).Vh  # (2, 2): to the principal axes of the means
    places = (means - origin) @ (turn @ axes).T
    log_priors = log_softmax(model.geometry.log_priors.astype(np.float64))
    return oriented(model.class_names, origin, turn @ axes, places, log_priors)


def plane_through(model: Model, classes: Sequence[int]) -> DecisionPlane:
    """The plane nearest to the means of ``classes`` in least squares, with these means projected.

    Posteriors are those between these classes.

    >>> import candid
    >>> plane_through(candid.GenerativeClassifier.from_preset("digits"), (4, 0, 7, 1)).means.shape
    (4, 2)
    """
    require(model, "geometry", "A decision plane")
    y = np.array(classes)
    means = model.geometry.means(y)  # (M, D)
    origin = means.mean(0)
    axes = np.linalg.svd(means - origin, full_matrices=False).Vh[:2]
    names = tuple(model.class_names[c] for c in classes)
    log_priors = log_softmax(model.geometry.log_priors[y].astype(np.float64))
    return oriented(names, origin, axes, (means - origin) @ axes.T, log_priors)


def check_fitted(classes: Sequence[int]) -> None:
    """Raise an error unless :func:`fitted_plane` takes this number of classes."""
    if not FEWEST_FITTED <= len(set(classes)) <= MOST_FITTED:
        raise CandidError(
            f"The plane of a photo model has {FEWEST_FITTED} to {MOST_FITTED} classes, not "
            f"{len(set(classes))}: choose them with --classes."
        )


def fitted_plane(model: Model, classes: Sequence[int], latents: Array, labels: Array) -> DecisionPlane:
    """The plane of ``classes`` that is fitted to images; the model stays as it is.

    Latents are projected linearly, ``p = A z + c``, and each class gets a mean in the plane. On average over
    the images, they minimise::

        -log p(y | p) + weight * (|p - m_y|^2 / 2 - log det(A A^T) / 2)

    The first term separates the classes. The second one is that of the density: it gives each class a
    standard deviation of about one. A lies in the span of the class means, in which the model decides.

    Args:
        model: a model with class means.
        classes: class numbers, M of them.
        latents: of images of these classes, (N, D).
        labels: their places in ``classes``, (N,).
    """
    require(model, "geometry", "A decision plane")
    check_fitted(classes)
    present = np.bincount(labels, minlength=len(classes)) > 0
    if not present.all():
        name = model.class_names[classes[int(present.argmin())]]
        raise CandidError(f"There are no images of '{name}' to fit the plane to: add some, or leave it out.")
    y = np.array(classes)
    means = model.geometry.means(y)  # (M, D)
    origin = means.mean(0)
    span = np.linalg.svd(means - origin, full_matrices=False).Vh[: len(y) - 1]  # (M - 1, D)
    log_priors = log_softmax(model.geometry.log_priors[y].astype(np.float64))
    axes, shift, places = _fit((latents - origin) @ span.T, labels, (means - origin) @ span.T, log_priors)
    middle = places.mean(0)
    turn = np.linalg.svd(places - middle, full_matrices=False).Vh  # to the principal axes of the means
    axes, places = turn @ axes, (places - middle) @ turn.T
    origin = origin - (turn @ (shift - middle)) @ np.linalg.pinv(axes).T @ span
    names = tuple(model.class_names[c] for c in classes)
    return oriented(names, origin, axes @ span, places, log_priors)


def _fit(z: Array, labels: Array, means: Array, log_priors: Array) -> tuple[Array, Array, Array]:
    """Return A (2, d), c (2,) and the means in the plane (M, 2) of :func:`fitted_plane`."""
    from scipy.optimize import minimize

    (classes, d), n = means.shape, len(z)
    right = np.eye(classes)[labels]

    def parts(numbers: Array) -> tuple[Array, Array, Array]:
        return numbers[: 2 * d].reshape(2, d), numbers[2 * d : 2 * d + 2], numbers[2 * d + 2 :].reshape(-1, 2)

    def loss(numbers: Array) -> tuple[float, Array]:
        a, c, m = parts(numbers)
        p = z @ a.T + c
        logits = p @ m.T - 0.5 * np.square(m).sum(1) + log_priors
        away, gram = p - right @ m, a @ a.T
        value = float((logsumexp(logits) - (logits * right).sum(1)).mean())
        value += DENSITY * float(0.5 * np.square(away).sum() / n - 0.5 * np.linalg.slogdet(gram).logabsdet)
        wrong = (softmax(logits) - right) / n
        by_p = wrong @ m + DENSITY * away / n
        by_m = wrong.T @ p - wrong.sum(0)[:, None] * m - DENSITY * right.T @ away / n
        by_a = by_p.T @ z - DENSITY * np.linalg.solve(gram, a)
        return value, np.concatenate((by_a.ravel(), by_p.sum(0), by_m.ravel()))

    random = np.random.default_rng(seed_of(classes, d))
    starts = [np.linalg.svd(means, full_matrices=False).Vh[:2]]
    starts += [np.linalg.qr(random.standard_normal((d, 2))).Q.T for _ in range(RESTARTS)]
    ends = [
        minimize(loss, np.concatenate((a.ravel(), np.zeros(2), (means @ a.T).ravel())), jac=True)
        for a in starts
    ]
    return parts(min(ends, key=lambda end: float(end.fun)).x)


def oriented(
    class_names: tuple[str, ...], origin: Array, axes: Array, means: Array, log_priors: Array
) -> DecisionPlane:
    """The plane with its axes (2, D) turned round where the mean that is furthest out is negative."""
    furthest = np.take_along_axis(means, np.abs(means).argmax(0)[None], 0)  # (1, 2)
    signs = np.where(furthest < 0, -1.0, 1.0)
    return DecisionPlane(
        class_names, origin, signs.T * axes, signs * means, np.asarray(log_priors, np.float64)
    )
