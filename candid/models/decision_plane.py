"""The decision plane: the means of a few classes in a plane, where all that decides between them is seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, log_softmax, logsumexp, softmax
from candid.models.protocol import Model, require


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
    """Orthonormal, (2, D)."""
    means: Array
    """m_y, (M, 2), in standard deviations of a class."""
    log_priors: Array
    """log p(y), (M,)."""

    def project(self, z: Array) -> Array:
        """p(z), the point of the plane nearest to each latent (N, D), in standard deviations, (N, 2)."""
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


def decision_plane(model: Model) -> DecisionPlane:
    """The plane that the means of a planar model lie in.

    >>> import candid
    >>> from candid.models.flow.planar import planar_model
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
    return oriented(model.class_names, origin, turn @ axes, places, model.geometry.log_priors)


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


def plane_of_three(model: Model, classes: Sequence[int]) -> DecisionPlane:
    """The plane through the means of three ``classes`` of a model with class means, as it is.

    Nothing is fine-tuned: three means always lie in a plane. Posteriors are those between the three.

    >>> import candid
    >>> plane = plane_of_three(candid.GenerativeClassifier.from_preset("digits"), [7, 1, 3])
    >>> plane.class_names, plane.means.shape
    (('7', '1', '3'), (3, 2))
    """
    require(model, "geometry", "A decision plane")
    if len(set(classes)) != 3:
        raise CandidError(
            f"The head of a photo model is not fine-tuned, so that its plane has three classes, not "
            f"{len(set(classes))}: choose three with --classes."
        )
    return plane_through(model, classes)


def oriented(
    class_names: tuple[str, ...], origin: Array, axes: Array, means: Array, log_priors: Array
) -> DecisionPlane:
    """The plane with its axes (2, D) turned round where the mean that is furthest out is negative."""
    furthest = np.take_along_axis(means, np.abs(means).argmax(0)[None], 0)  # (1, 2)
    signs = np.where(furthest < 0, -1.0, 1.0)
    return DecisionPlane(
        class_names, origin, signs.T * axes, signs * means, np.asarray(log_priors, np.float64)
    )
