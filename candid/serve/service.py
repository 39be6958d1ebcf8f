"""A model that answers requests: what the library says, as JSON."""

import base64
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from candid._support.errors import CandidError
from candid.data.images import to_png
from candid.explanations.counterfactual import Counterfactual, counterfactual
from candid.explanations.explainer import Explainer, Explanation
from candid.explanations.similarity import similarity
from candid.inference.predictions import batch_size
from candid.models.protocol import Model, as_latent, require_latent
from candid.serve.answers import (
    Changed,
    ClassMap,
    ClassShare,
    Explained,
    HeldOutScores,
    Impossible,
    Judged,
    Maps,
    ModelInfo,
    Neighbour,
    Sent,
    Space,
    Step,
    Tail,
    Taken,
    Unusable,
)
from candid.serve.limits import FILES, Limits
from candid.trust.examine import Examiner
from candid.trust.examine import Unusable as NoExamination
from candid.trust.judge import Judge
from candid.trust.verdict import Examination

TOP = 5
"""Heatmaps and nearest classes."""
SMALL = 64
"""Pixels on a side."""
BARS, KNOWN = 40, 2000
"""Of the histogram of held-out scores; and how many of them are enough for it."""


@dataclass(frozen=True)
class Asked:
    """An image as the model sees it, and what is asked about it."""

    file: str
    image: Tensor
    explain: bool = False
    towards: int = 0
    target: float = 0.5

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, without the detour that tensors take."""
        pixels = self.image.contiguous().numpy()
        return _asked, (self.file, pixels, self.explain, self.towards, self.target)


def _asked(file: str, pixels: "np.ndarray[Any, Any]", *others: Any) -> Asked:
    return Asked(file, torch.from_numpy(pixels), *others)


class Service:
    """A model, ready to answer; used by one thread at a time."""

    ready = True

    def __init__(self, model: Model, name: str, summary: str | None = None) -> None:
        self.examiner = Examiner(model, name, evidence=True)
        self.preprocessing = self.examiner.preprocessing
        self.model, self.name, self.summary = self.examiner.model, name, summary
        self.classes = self.model.class_names
        has_latent = as_latent(self.model) is not None
        self.explainer = Explainer(model, TOP) if has_latent and len(self.classes) > 1 else None
        self.neighbours = [] if self.explainer is None else _neighbours(model)

    def info(self, limits: Limits) -> ModelInfo:
        """What the model is, what it can't do, and what may be sent."""
        judge = self.examiner.judge
        return ModelInfo(
            name=self.name,
            kind=self.model.kind,
            summary=self.summary,
            classes=list(self.classes),
            image_shape=self.model.image_shape,
            held_out=None if judge is None else _held_out(judge),
            cannot=list(self._missing()),
            limits=Taken(files=FILES, megabytes=limits.max_megabytes, pixels=limits.max_pixels),
        )

    @property
    def batch(self) -> int:
        """Images that should pass the network together, at most."""
        return min(64, batch_size(self.model))

    @property
    def workers(self) -> int:
        """Processes that should have a network each: of small images one a core, up to four.

        A batch of small images is faster on a core of its own than on two: its layers are too short to share.
        """
        _, height, width = self.model.image_shape
        small = self.model.device.type == "cpu" and height * width <= SMALL**2
        return min(4, torch.get_num_threads()) if small else 0

    def _missing(self) -> Sequence[str]:
        found = []
        if as_latent(self.model) is None:
            found.append(
                "This model is a ResNet, which has no likelihood and no class means: it shows no decision "
                "space, heatmaps, nearest classes or counterfactuals."
            )
        if self.examiner.judge is None:
            found.append(
                "This model carries no held-out scores, so it gives no p-value and no verdict: "
                "'candid calibrate' adds them."
            )
        return found

    def answer(self, requests: Sequence[Sequence[Asked]]) -> list[list[Sent] | Exception]:
        """As :meth:`examine`, written out."""
        return [
            each if isinstance(each, Exception) else [Sent.of(found) for found in each]
            for each in self.examine(requests)
        ]

    def examine(self, requests: Sequence[Sequence[Asked]]) -> list[list[Judged | Unusable] | Exception]:
        """The answers to each request, from one pass of the network; an exception if there are none."""
        images = [each.image for asked in requests for each in asked]
        found = iter(self.examiner.judged([(str(i), image) for i, image in enumerate(images)]))
        answers: list[list[Judged | Unusable] | Exception] = []
        for asked in requests:
            judged = list(islice(found, len(asked)))
            try:
                answers.append([self._answer(*pair) for pair in zip(asked, judged, strict=True)])
            except Exception as error:
                error.add_note(traceback.format_exc())  # which is lost on the way to another process
                answers.append(error)
        return answers

    def _answer(self, asked: Asked, found: Examination | NoExamination) -> Judged | Unusable:
        if isinstance(found, Examination):
            return self._judged(asked, found)
        return unusable(asked.file, found.reason)

    def _judged(self, asked: Asked, examined: Examination) -> Judged:
        assert examined.evidence is not None
        explained = None
        if asked.explain and self.explainer is not None:
            explained = self._explained(examined, self.explainer.explain(examined))
        return Judged(
            file=asked.file,
            class_=examined.label,
            posterior=examined.confidence,
            classes=[
                ClassShare(class_=name, posterior=share)
                for name, share in examined.to_dict()["posterior"].items()
            ],
            p_value=examined.p_value,
            p_value_in_class=examined.class_p_value,
            verdict=examined.verdict,
            agreeing=None if examined.classes is None else list(examined.classes),
            log_density_nats=examined.log_density,
            seen=as_png(examined.evidence.image) if asked.explain else None,
            explanation=explained,
        )

    def _shares(self, classes: Sequence[int], posterior: Sequence[float]) -> list[ClassShare]:
        return [
            ClassShare(class_=self.classes[y], posterior=share)
            for y, share in zip(classes, posterior, strict=True)
        ]

    def _explained(self, examined: Examination, explanation: Explanation) -> Explained:
        maps, space = explanation.maps, explanation.space
        return Explained(
            reading=explanation.reading.kind,
            in_words=explanation.reading.sentence,
            heatmaps=Maps(
                saliency_nats=maps.saliency[0].tolist(),
                classes=[
                    ClassMap(class_=self.classes[y], log_posterior_nats=log_posterior, values_nats=values)
                    for y, log_posterior, values in zip(
                        maps.classes[0].tolist(),
                        maps.log_posterior[0].tolist(),
                        maps.posterior[0].tolist(),
                        strict=True,
                    )
                ],
            ),
            decision_space=Space(
                classes=self._shares(space.classes, space.posterior),
                along=space.along,
                away=space.away,
                means_along=list(space.means_along),
                means_away=list(space.means_away),
                half_width=space.half_width,
                half_height=space.half_height,
                boundary=space.boundary,
            ),
            nearest_classes=self.neighbours[self.classes.index(examined.label)],
        )

    def change(self, asked: Asked) -> Changed | Impossible:
        """What would make it the class ``asked.towards``."""
        fast = self.examiner.frozen
        try:
            return self._changed(
                asked,
                counterfactual(
                    require_latent(fast, "A counterfactual"), asked.image, asked.towards, asked.target
                ),
            )
        except CandidError as error:
            return Impossible(file=asked.file, error=str(error))

    def _changed(self, asked: Asked, found: Counterfactual) -> Changed:
        before = int(found.posteriors[0].argmax())
        return Changed(
            file=asked.file,
            class_=self.classes[found.y],
            class_before=self.classes[before],
            target=found.target,
            posterior=float(found.posterior[found.y]),
            reached=found.reached,
            length_in_standard_deviations=found.length,
            bits_per_dim=found.bits_per_dim,
            steps=[
                Step(
                    image=as_png(image),
                    posterior=float(posterior[found.y]),
                    posterior_before=float(posterior[before]),
                )
                for image, posterior in zip(found.steps, found.posteriors, strict=True)
            ],
        )


def unusable(file: str, reason: object) -> Unusable:
    """In one sentence."""
    return Unusable(file=file, error=f"This file can't be used: {reason}.")


def as_png(image: Tensor) -> str:
    """Return an 8-bit image (C, H, W) as a PNG in base64."""
    return base64.b64encode(to_png(image)).decode()


def _neighbours(model: Model) -> list[list[Neighbour]]:
    """Of each class, the nearest others."""
    found = similarity(model, order="given")
    nearest = found.distances.argsort(dim=1, stable=True)
    return [
        [
            Neighbour(
                class_=found.names[j],
                distance=float(found.distances[i, j]),
                expected_uncertainty=float(found.uncertainty[i, j]),
            )
            for j in [j for j in row[: TOP + 1] if j != i][:TOP]
        ]
        for i, row in enumerate(nearest.tolist())
    ]


def _held_out(judge: Judge) -> HeldOutScores:
    """With the histogram of the scores that p-values come from, as the p-value at the ends of its bars."""
    known = judge.held_out.statistics
    detector = judge.detector
    chosen = torch.linspace(0, len(judge.held_out) - 1, min(KNOWN, len(judge.held_out))).round().long()
    statistic = judge.score.of(known)[chosen]
    scores, order = detector.score(statistic).sort()
    p_values = detector.p_value(statistic)[order]
    beyond = scores[p_values <= judge.novelty / 2]  # of the farthest the first: others would be narrow
    last = beyond[0] if len(beyond) else scores[-1]
    ends = np.linspace(float(scores[0]), float(last), BARS + 1)
    return HeldOutScores(
        images=len(judge.held_out),
        test=judge.score.name,
        novelty=judge.novelty,
        error=judge.error,
        tail=Tail(scores=ends.tolist(), p_values=np.interp(ends, scores.numpy(), p_values.numpy()).tolist()),
    )
