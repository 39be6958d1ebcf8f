"""A model that answers requests: what the library says, as responses of the API."""

import base64
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid._support.threads import usable_cpus
from candid.data.images import Preprocessing, to_png
from candid.explanations.adopted_maps import AdoptedMaps, adopted_maps
from candid.explanations.counterfactual import Counterfactual, counterfactual
from candid.explanations.explainer import Explainer, Explanation
from candid.explanations.nearest_photos import NO_INVERSE, NearestPhotos
from candid.explanations.photo_maps import PhotoMaps
from candid.explanations.similarity import entry, similarity
from candid.inference.predictions import to_float
from candid.models import checkpoint, zoo
from candid.models.heads.adopted import AdoptedModel
from candid.models.heads.photo import PhotoModel
from candid.models.protocol import Model, as_latent, require_latent
from candid.serve import schemas
from candid.serve.schemas import EncodedResponse, ImageRequest
from candid.trust.examine import Examiner, Unusable
from candid.trust.judge import HeldOut, Judge
from candid.trust.verdict import Examination
from candid.trust.watched import WatchedScore

Response = schemas.ExaminationResponse | schemas.UnusableResponse
TOP = 5
"""Heatmaps and nearest classes."""
SPACE = (
    *("along", "away", "means_along", "means_away", "half_width", "half_height", "boundary"),
    *("inside", "outside", "outside_expected"),
)
"""The parts of a decision space that are sent unchanged."""
KINDS = {"resnet": "ResNet"}
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
    fingerprint: str
    """Of the model and its held-out scores."""
    watch: str | None
    """A watch for drift that has seen the held-out images, as text; None if there are none."""


class Service:
    """A model, ready to answer; used by one thread at a time."""

    ready = True

    def __init__(self, model: Model, name: str, summary: str | None = None) -> None:
        score = None if HeldOut.of(model) is None else WatchedScore.of(model)
        self.examiner = Examiner(model, name, evidence=True, watched=score)
        self.model, self.classes = self.examiner.model, model.class_names
        described = as_latent(self.model) is not None or isinstance(self.model, PhotoModel)
        explainable = described and len(self.classes) > 1
        self.explainer = Explainer(self.model, TOP) if explainable else None
        self.neighbours = _neighbours(self.model) if explainable else []
        self.description = Description(
            self._info(name, summary),
            self.examiner.preprocessing,
            min(64, self.examiner.batch),
            _workers(self.model),
            self.model.fingerprint() if score is None else score.identity(self.model),
            None if score is None else score.watch(self.classes).to_json(),
        )

    @classmethod
    def load(cls, model: str, name: str) -> "Service":
        """Load a model folder or a bundled model."""
        loaded = checkpoint.resolve(model)
        return cls(loaded, name, None if Path(model).exists() else zoo.card(model)["summary"])

    def use_threads(self, threads: int) -> None:
        """Let the network use this number of threads, and let torch prepare for it."""
        torch.set_num_threads(threads)
        self.warm_up()

    def warm_up(self) -> None:
        """Answer a few requests, so that the first user does not wait for what torch prepares."""
        grey = torch.full(self.model.image_shape, 128, dtype=torch.uint8)
        for explain in (True, False, False):
            self.answer([[ImageRequest("", grey, explain)]])

    def _info(self, name: str, summary: str | None) -> schemas.ModelResponse:
        judge = self.examiner.judge
        return schemas.ModelResponse(
            name=name,
            kind=self.model.kind,
            summary=summary,
            classes=list(self.classes),
            image_shape=self.model.image_shape,
            held_out=None if judge is None else _held_out(judge),
            can=self._shown(),
            cannot=_missing(self.model, judge),
        )

    def _shown(self) -> list[str]:
        """Return what an explanation shows."""
        where = "which parts of the image speak for which class"
        if self.explainer is None:
            return [where] if _adopted_with_maps(self.model) else []
        between = "where the image lies between the classes"
        if isinstance(self.model, PhotoModel):
            maps = [where] if getattr(self.model.eye, "has_maps", True) else []
            known = ["the nearest photos that the model knows"] if self.model.thumbnails else []
            return [*maps, between, *known]
        return [where, between, "how it would have to change to become another class"]

    def answer(self, requests: Sequence[Sequence[ImageRequest]]) -> list[list[EncodedResponse] | Exception]:
        """Return the answers of :meth:`examine` as JSON."""
        return [
            each if isinstance(each, Exception) else [EncodedResponse.of(found) for found in each]
            for each in self.examine(requests)
        ]

    def examine(self, requests: Sequence[Sequence[ImageRequest]]) -> list[list[Response] | Exception]:
        """Return the answers to each request, from one pass; an exception if there are none."""
        found = iter(self.examiner.judged([(each.path, each.image) for asked in requests for each in asked]))
        answers: list[list[Response] | Exception] = []
        for asked in requests:
            judged = list(islice(found, len(asked)))
            try:
                answers.append([self._answer(*pair) for pair in zip(asked, judged, strict=True)])
            except Exception as error:
                error.add_note(traceback.format_exc())  # which is lost on the way to another process
                answers.append(error)
        return answers

    def _answer(self, asked: ImageRequest, found: Examination | Unusable) -> Response:
        if isinstance(found, Unusable):
            return unusable(asked.path, found.reason)
        explanation = None
        if asked.explain and self.explainer is not None:
            explanation = self._explained(found, self.explainer.explain(found))
        elif asked.explain and _adopted_with_maps(self.model):
            explanation = self._adopted(found)
        seen = as_png(asked.image) if asked.explain else None
        response = schemas.ExaminationResponse(**found.to_dict(), seen=seen, explanation=explanation)
        response._sighting = found.sighting
        return response

    def _explained(self, examined: Examination, explanation: Explanation) -> schemas.ExplanationResponse:
        space = explanation.space
        return schemas.ExplanationResponse(
            kind=explanation.summary.kind,
            summary=explanation.summary.sentence,
            heatmaps=self._heatmaps(explanation.maps, examined),
            decision_space=schemas.DecisionSpaceResponse(
                posterior={
                    self.classes[y]: share for y, share in zip(space.classes, space.posterior, strict=True)
                },
                **{name: getattr(space, name) for name in SPACE},
            ),
            nearest_classes=self.neighbours[self.classes.index(examined.label)],
            nearest_photos=None if explanation.nearest is None else self._nearest(explanation.nearest),
        )

    def _adopted(self, examined: Examination) -> schemas.ExplanationResponse:
        assert examined.evidence is not None and isinstance(self.model, AdoptedModel)
        found = adopted_maps(self.model, to_float(examined.evidence.image, self.model.device))
        return schemas.ExplanationResponse(
            kind=None,
            summary=None,
            heatmaps=self._heatmaps(found, examined),
            decision_space=None,
            nearest_classes=[],
            nearest_photos=None,
        )

    def _heatmaps(self, maps: Any, examined: Examination) -> schemas.HeatmapsResponse | None:
        if isinstance(maps, str):
            return None
        if isinstance(maps, PhotoMaps | AdoptedMaps):
            if isinstance(maps, PhotoMaps):
                why = [(each.y, each.values, each.score, each.baseline) for each in maps.why]
            else:
                why = list(
                    zip(maps.classes, maps.maps, maps.scores.tolist(), maps.baselines.tolist(), strict=True)
                )
            return schemas.HeatmapsResponse(
                saliency_nats=None,
                classes=[
                    schemas.ClassMapResponse(
                        class_=self.classes[y],
                        log_posterior_nats=math.log(max(examined.posterior[self.classes[y]], 1e-300)),
                        values_nats=values.tolist(),
                        score_nats=score,
                        baseline_nats=baseline,
                    )
                    for y, values, score, baseline in why
                ],
            )
        by_class = (maps.classes[0], maps.log_posterior[0], maps.posterior[0])
        return schemas.HeatmapsResponse(
            saliency_nats=maps.saliency[0].tolist(),
            classes=[
                schemas.ClassMapResponse(
                    class_=self.classes[y],
                    log_posterior_nats=total,
                    values_nats=values,
                    score_nats=None,
                    baseline_nats=None,
                )
                for y, total, values in zip(*(each.tolist() for each in by_class), strict=True)
            ],
        )

    def _nearest(self, found: NearestPhotos) -> schemas.NearestPhotosResponse:
        nearest, of_instead = (
            [
                schemas.KnownPhotoResponse(
                    class_=self.classes[each.y], image=base64.b64encode(each.jpeg).decode()
                )
                for each in photos
            ]
            for photos in (found.nearest, found.of_instead)
        )
        return schemas.NearestPhotosResponse(
            nearest=nearest, instead=self.classes[found.instead], of_instead=of_instead
        )

    def change(self, asked: ImageRequest) -> schemas.ChangedResponse | schemas.ImpossibleResponse:
        """Return what would make the image the class ``asked.towards``."""
        try:
            model = require_latent(self.examiner.frozen, "A counterfactual")
            return self._changed(asked, counterfactual(model, asked.image, asked.towards, asked.target))
        except CandidError as error:
            return schemas.ImpossibleResponse(path=asked.path, error=str(error))

    def _changed(self, asked: ImageRequest, found: Counterfactual) -> schemas.ChangedResponse:
        before = int(found.posteriors[0].argmax())
        return schemas.ChangedResponse(
            path=asked.path,
            class_=self.classes[found.y],
            class_before=self.classes[before],
            target=found.target,
            posterior=float(found.posterior[found.y]),
            reached=found.reached,
            length_in_standard_deviations=found.length,
            bits_per_dim=found.bits_per_dim,
            steps=[
                schemas.StepResponse(
                    image=as_png(image),
                    posterior=float(posterior[found.y]),
                    posterior_before=float(posterior[before]),
                )
                for image, posterior in zip(found.steps, found.posteriors, strict=True)
            ],
        )


def _workers(model: Model) -> int:
    """Return how many processes should hold a network: for small images one per core, up to four.

    A batch of small images is faster on one core than on two: its layers are too short to share.
    """
    _, height, width = model.image_shape
    return min(4, usable_cpus()) if model.device.type == "cpu" and height * width <= SMALL**2 else 1


def _adopted_with_maps(model: Model) -> bool:
    return isinstance(model, AdoptedModel) and model.eye.last_layer() is not None


def _missing(model: Model, judge: Judge | None) -> list[str]:
    found = []
    if model.density_of == "features":
        instead = isinstance(model, PhotoModel) and bool(model.thumbnails)
        found.append(
            f"{NO_INVERSE}, so this page can't show how the image would have to change"
            f"{'; it shows the nearest photos that the model knows' * instead}."
        )
        if not isinstance(model, PhotoModel):
            maps = "" if _adopted_with_maps(model) else "heatmaps, "
            found.append(f"It has no class means: there are no {maps}decision space or nearest classes.")
    elif as_latent(model) is None:
        found.append(
            f"This model is a {KINDS.get(model.kind, model.kind)}, which has no class means in its latent: "
            "it shows no decision space, heatmaps, nearest classes or counterfactuals."
        )
    if judge is None:
        found.append(
            "This model has no held-out scores, so it gives no p-value and no verdict: 'candid calibrate' "
            "adds them."
        )
    return found


def unusable(path: str, reason: object) -> schemas.UnusableResponse:
    """Return why a file can't be used, in one sentence."""
    return schemas.UnusableResponse(path=path, error=f"This file can't be used: {reason}.")


def as_png(image: Tensor) -> str:
    """Return an 8-bit image (C, H, W) as a PNG in base64."""
    return base64.b64encode(to_png(image)).decode()


def _neighbours(model: Model) -> list[list[schemas.NeighbourResponse]]:
    """Return the nearest classes of each class."""
    found = similarity(model, order="given")
    nearest = found.distances.argsort(dim=1, stable=True)
    return [
        [
            schemas.NeighbourResponse(
                class_=found.names[j],
                distance=float(found.distances[i, j]),
                expected_uncertainty=float(found.uncertainty[i, j]),
                measured_uncertainty=entry(found.measured, i, j),
            )
            for j in [j for j in row[: TOP + 1] if j != i][:TOP]
        ]
        for i, row in enumerate(nearest.tolist())
    ]


def _held_out(judge: Judge) -> schemas.HeldOutResponse:
    """Return the levels and the histogram of held-out scores, as p-values at the ends of its bars."""
    known = judge.held_out.statistics
    chosen = torch.linspace(0, len(judge.held_out) - 1, min(KNOWN, len(judge.held_out))).round().long()
    statistic = judge.score.of(known)[chosen]
    scores, order = judge.detector.score(statistic).sort()
    p_values = judge.detector.p_value(statistic)[order]
    beyond = scores[p_values <= judge.novelty / 2]  # up to the first of these: further bars would be narrow
    last = beyond[0] if len(beyond) else scores[-1]
    ends = np.linspace(float(scores[0]), float(last), BARS + 1)
    return schemas.HeldOutResponse(
        images=len(judge.held_out),
        score=judge.score.name,
        novelty=judge.novelty,
        error=judge.error,
        tail=schemas.TailResponse(
            scores=ends.tolist(), p_values=np.interp(ends, scores.numpy(), p_values.numpy()).tolist()
        ),
    )
