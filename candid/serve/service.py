"""A model that answers requests: what the library says, as responses of the API."""

import base64
import math
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from candid._support.errors import CandidError
from candid._support.numbers import Array, usable_cpus
from candid.data.images import Preprocessing, to_png
from candid.explanations.class_maps import ClassMaps
from candid.explanations.decision_space import DecisionSpace
from candid.explanations.explainer import NO_INVERSE, Explainer, Explanation, KnownPhoto, NearestPhotos
from candid.explanations.similarity import entry, similarity
from candid.judging.examine import Examiner
from candid.judging.held_out import HeldOut
from candid.judging.watched import WatchedScore
from candid.models import checkpoint, zoo
from candid.models.protocol import Model, require
from candid.reports.demo import sample_photos
from candid.serve import schemas
from candid.serve.lessons import learned_by
from candid.serve.schemas import EncodedResponse, ImageRequest
from candid.trust.ranking import ALL
from candid.trust.rule import Rule
from candid.trust.verdict import KINDS, Examination, UnusableImage

if TYPE_CHECKING:
    from candid.explanations.counterfactual import Counterfactual

Response = schemas.ExaminationResponse | schemas.UnusableResponse
TOP, TOP_WITHOUT_MEANS = 5, 3
"""Heatmaps and nearest classes, and heatmaps of models without class means."""
SPACE = (
    *("along", "away", "means_along", "means_away", "half_width", "half_height", "boundary"),
    *("inside", "outside", "outside_expected"),
)
"""The parts of a decision space that are sent unchanged."""
SMALL = 64
"""Pixels on a side."""
BARS, KNOWN = 40, 2000
"""Bars of the histogram of held-out scores, and the number of scores that is enough for it."""


@dataclass(frozen=True)
class Description:
    """What the server's own process knows about the model."""

    info: schemas.ModelResponse
    preprocessing: Preprocessing
    batch: int
    """Images that should pass the network together, at most."""
    workers: int
    """Processes that should hold a network each."""
    examples: tuple[Path, ...]
    """Photos to try it with."""
    fingerprint: str
    """Of the model and its held-out scores."""
    watch: str | None
    """A watch for drift that has seen the held-out images, as text; None if there are none."""
    learned: dict[str, str]
    """The corrections that it has learned: names of classes by digest of the photo."""


class Service:
    """A model, ready to answer; used by one thread at a time."""

    ready = True

    def __init__(
        self, model: Model, name: str, summary: str | None = None, examples: Sequence[Path] = ()
    ) -> None:
        held_out = HeldOut.of(model)
        score = None if held_out is None else WatchedScore.of(model)
        self.examiner = Examiner(model, name, evidence=True, watched=score)
        self.model, self.classes = self.examiner.model, model.class_names
        has_means = {"geometry", "class maps"} <= self.model.can and len(self.classes) > 1
        has_maps = "geometry" not in self.model.can and "class maps" in self.model.can
        top = TOP if has_means else TOP_WITHOUT_MEANS
        self.explainer = Explainer(self.model, top) if has_means or has_maps else None
        self.neighbours = _neighbours(self.model) if has_means else []
        self.description = Description(
            self._info(name, summary, 0 if held_out is None else len(held_out)),
            self.examiner.preprocessing,
            min(64, self.examiner.batch),
            _workers(self.model),
            tuple(examples),
            self.model.fingerprint() if score is None else score.identity(self.model),
            None if score is None else score.watch(self.classes).to_json(),
            learned_by(model),
        )

    @classmethod
    def load(cls, model: str, name: str) -> "Service":
        """Load a model folder or a bundled model."""
        loaded = checkpoint.resolve(model)
        if not checkpoint.is_bundled(model):
            return cls(loaded, name)
        return cls(loaded, name, zoo.card(model)["summary"], sample_photos(model, loaded.image_shape[0]))

    def use_threads(self, threads: int) -> None:
        """Let the network use this number of threads, and prepare what that needs."""
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
        self.warm_up()

    def warm_up(self) -> None:
        """Answer a few requests, so that the first user does not wait for what is prepared once."""
        grey = np.full(self.model.image_shape, 128, dtype=np.uint8)
        for explain in (True, False, False):
            self.answer([[ImageRequest("", grey, explain)]])

    def _info(self, name: str, summary: str | None, held_out: int) -> schemas.ModelResponse:
        rule = self.examiner.rule
        return schemas.ModelResponse(
            name=name,
            kind=self.model.kind,
            summary=summary,
            classes=list(self.classes),
            image_shape=self.model.image_shape,
            margin=self.examiner.preprocessing.margin,
            held_out=None if rule is None else _held_out(rule, held_out),
            verdicts=[schemas.VerdictResponse(kind=kind, **look._asdict()) for kind, look in KINDS.items()],
            abilities=sorted(self.model.can),
            can=self._shown(),
            cannot=_missing(self.model, rule),
        )

    def _shown(self) -> list[str]:
        """Return what an explanation shows."""
        if self.explainer is None:
            return []
        shown = {
            "which parts of the image speak for which class": "class maps" in self.model.can,
            "where the image lies between the classes": "geometry" in self.model.can,
            "how it would have to change to become another class": "invert" in self.model.can,
            "the nearest photos that the model knows": "known photos" in self.model.can,
        }
        return [what for what, is_shown in shown.items() if is_shown]

    def answer(self, requests: Sequence[Sequence[ImageRequest]]) -> list[list[EncodedResponse] | Exception]:
        """Return the answers of :meth:`examine` as JSON."""
        return [
            responses if isinstance(responses, Exception) else [*map(EncodedResponse.of, responses)]
            for responses in self.examine(requests)
        ]

    def examine(self, requests: Sequence[Sequence[ImageRequest]]) -> list[list[Response] | Exception]:
        """Return the answers to each request, from one pass; an exception if there are none."""
        judged = iter(self.examiner.judged([(each.path, each.image) for asked in requests for each in asked]))
        answers: list[list[Response] | Exception] = []
        for asked in requests:
            examinations = list(islice(judged, len(asked)))
            try:
                answers.append([self._answer(*pair) for pair in zip(asked, examinations, strict=True)])
            except Exception as error:
                error.add_note(traceback.format_exc())  # which is lost on the way to another process
                answers.append(error)
        return answers

    def _answer(self, asked: ImageRequest, examined: Examination | UnusableImage) -> Response:
        if isinstance(examined, UnusableImage):
            return unusable(asked.path, examined.reason)
        explanation = None
        if asked.explain and self.explainer is not None:
            explanation = self._explained(examined, self.explainer.explain(examined))
        seen = as_png(asked.image) if asked.explain else None
        response = schemas.ExaminationResponse(**examined.to_dict(), seen=seen, explanation=explanation)
        response._sighting = examined.sighting
        return response

    def _explained(self, examined: Examination, explanation: Explanation) -> schemas.ExplanationResponse:
        space, summary, maps = explanation.space, explanation.summary, explanation.maps
        return schemas.ExplanationResponse(
            kind=None if summary is None else summary.kind,
            summary=None if summary is None else summary.sentence,
            heatmaps=None if isinstance(maps, str) else self._heatmaps(maps, examined),
            decision_space=None if space is None else self._space(space),
            nearest_classes=self.neighbours[self.classes.index(examined.label)] if self.neighbours else [],
            nearest_photos=None if explanation.nearest is None else self._nearest(explanation.nearest),
        )

    def _space(self, space: DecisionSpace) -> schemas.DecisionSpaceResponse:
        names = [self.classes[y] for y in space.classes]
        return schemas.DecisionSpaceResponse(
            posterior=dict(zip(names, space.posterior, strict=True)),
            **{name: getattr(space, name) for name in SPACE},
        )

    def _heatmaps(self, maps: ClassMaps, examined: Examination) -> schemas.HeatmapsResponse:
        """Return the maps; those with a saliency add up to the log posterior, others to score - baseline."""
        of_posterior = maps.saliency is not None
        return schemas.HeatmapsResponse(
            saliency_nats=None if maps.saliency is None else maps.saliency.tolist(),
            classes=[
                schemas.ClassMapResponse(
                    class_=self.classes[y],
                    log_posterior_nats=score if of_posterior else _log(examined.posterior[self.classes[y]]),
                    values_nats=values,
                    score_nats=None if of_posterior else score,
                    baseline_nats=None if of_posterior else baseline,
                )
                for y, values, score, baseline in zip(
                    maps.classes,
                    maps.values.tolist(),
                    maps.scores.tolist(),
                    maps.baselines.tolist(),
                    strict=True,
                )
            ],
        )

    def _nearest(self, photos: NearestPhotos) -> schemas.NearestPhotosResponse:
        return schemas.NearestPhotosResponse(
            nearest=[self._photo(photo) for photo in photos.nearest],
            instead=self.classes[photos.instead],
            of_instead=[self._photo(photo) for photo in photos.of_instead],
        )

    def _photo(self, photo: KnownPhoto) -> schemas.KnownPhotoResponse:
        image = base64.b64encode(photo.jpeg).decode()
        return schemas.KnownPhotoResponse(class_=self.classes[photo.y], image=image)

    def change(self, asked: ImageRequest) -> schemas.ChangedResponse | schemas.ImpossibleResponse:
        """Return what would make the image the class ``asked.towards``."""
        try:
            model = require(self.examiner.frozen, "invert", "A counterfactual")
            from candid.explanations.counterfactual import counterfactual

            return self._changed(asked, counterfactual(model, asked.image, asked.towards, asked.target))
        except CandidError as error:
            return schemas.ImpossibleResponse(path=asked.path, error=str(error))

    def _changed(self, asked: ImageRequest, changed: "Counterfactual") -> schemas.ChangedResponse:
        before = int(changed.posteriors[0].argmax())
        return schemas.ChangedResponse(
            path=asked.path,
            class_=self.classes[changed.y],
            class_before=self.classes[before],
            target=changed.target,
            posterior=float(changed.posterior[changed.y]),
            reached=changed.reached,
            length_in_standard_deviations=changed.length,
            bits_per_dim=changed.bits_per_dim,
            steps=[
                schemas.StepResponse(
                    image=as_png(image),
                    posterior=float(posterior[changed.y]),
                    posterior_before=float(posterior[before]),
                )
                for image, posterior in zip(changed.steps, changed.posteriors, strict=True)
            ],
        )


def _workers(model: Model) -> int:
    """Return how many processes should hold a network: for small images one per core, up to four.

    A batch of small images is faster on one core than on two: its layers are too short to share.
    """
    _, height, width = model.image_shape
    on_cpu = str(model.device) == "cpu"
    return min(4, usable_cpus()) if on_cpu and height * width <= SMALL**2 else 1


def _missing(model: Model, rule: Rule | None) -> list[str]:
    """Return what the page can't show, and why: one sentence each."""
    sentences = []
    if "eye" in model.can:
        sentences.append(
            f"{NO_INVERSE}, so this page can't show how the image would have to change"
            f"{'; it shows the nearest photos that the model knows' * ('known photos' in model.can)}."
        )
        if "geometry" not in model.can:
            maps = "" if "class maps" in model.can else "heatmaps, "
            sentences.append(f"It has no class means: there are no {maps}decision space or nearest classes.")
    elif "geometry" not in model.can:
        sentences.append(
            f"This model is a {type(model).__name__}, which has no class means in its latent: "
            "it shows no decision space, heatmaps, nearest classes or counterfactuals."
        )
    if rule is None:
        sentences.append(
            "This model has no held-out scores, so it gives no p-value and no verdict: 'candid calibrate' "
            "adds them."
        )
    return sentences


def unusable(path: str, reason: object) -> schemas.UnusableResponse:
    """Return why a file can't be used, in one sentence."""
    return schemas.UnusableResponse(path=path, error=f"This file can't be used: {reason}.")


def as_png(image: Array) -> str:
    """Return an 8-bit image (C, H, W) as a PNG in base64."""
    return base64.b64encode(to_png(image)).decode()


def _log(probability: float) -> float:
    return math.log(max(probability, 1e-300))


def _neighbours(model: Model) -> list[list[schemas.NeighbourResponse]]:
    """Return the nearest classes of each class."""
    classes = similarity(model, order="given")
    nearest = np.argsort(classes.distances, axis=1, kind="stable")
    return [
        [
            schemas.NeighbourResponse(
                class_=classes.names[j],
                distance=float(classes.distances[i, j]),
                expected_uncertainty=float(classes.uncertainty[i, j]),
                measured_uncertainty=entry(classes.measured, i, j),
            )
            for j in [j for j in row[: TOP + 1] if j != i][:TOP]
        ]
        for i, row in enumerate(nearest.tolist())
    ]


def _held_out(rule: Rule, images: int) -> schemas.HeldOutResponse:
    """Return the levels and the histogram of held-out scores, as p-values at the ends of its bars."""
    promises, (ranking, *_) = rule.promises[ALL], rule.distinct
    chosen = np.linspace(0, ranking.count() - 1, min(KNOWN, ranking.count())).round().astype(np.int64)
    values, detector = ranking.values[chosen], ranking.detector(ALL)
    order = np.argsort(detector.score(values), kind="stable")
    scores, p_values = detector.score(values)[order], detector.p_value(values)[order]
    novelty = promises.novelty.in_force
    beyond = scores[p_values <= novelty / 2]  # up to the first of these: further bars would be narrow
    last = beyond[0] if len(beyond) else scores[-1]
    ends = np.linspace(float(scores[0]), float(last), BARS + 1)
    return schemas.HeldOutResponse(
        images=images,
        score=promises.score,
        novelty=novelty,
        error=promises.error.in_force,
        tail=schemas.TailResponse(scores=ends.tolist(), p_values=np.interp(ends, scores, p_values).tolist()),
    )
