"""The pictures of an audit, as parts of its page."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from candid._support.errors import CandidError
from candid._support.numbers import Array
from candid._support.randomness import draws
from candid._support.text import listed, percent
from candid.data.thumbnails import data_uri, inline_thumbnail
from candid.evaluation.calibration_error import all_bins, top_bins
from candid.evaluation.compare import read_rows
from candid.reports.audit.grades import CONTROL
from candid.reports.audit.record import AuditResult
from candid.reports.plots import attacks as attacks_plots
from candid.reports.plots import comparison as comparison_plots
from candid.reports.plots import evaluation as evaluation_plots
from candid.reports.plots import examine as examine_plots
from candid.reports.plots import explanations as explanation_plots
from candid.reports.plots import latent as latent_plots
from candid.reports.plots import style
from candid.robustness.corruptions.benchmark import CORRUPTIONS, SEVERITIES, corrupted
from candid.trust.ranking import new_detector
from candid.trust.verdict import KINDS

SCREEN, DRAWN = 96, 140
"""Dots per inch: of a page, and of what :func:`candid.reports.plots.style.save` writes."""
ROOM = 6_500_000
"""Bytes for all pictures: each takes at most a quarter of what is left, and is reduced until it does."""
REDUCTIONS = (1, 0.7, 0.5, 0.35, 0.25)
TEMPERATURES = (0.5, 0.8, 1.0)
MISTAKES, MISTAKE = 8, 160
"""The most photos of mistakes of a model, and their side in pixels."""


@dataclass(frozen=True)
class Picture:
    """A figure as an address that contains it."""

    address: str
    width: int
    height: int
    """Size on the page, in pixels."""
    alt: str
    caption: str


class Pictures:
    """Draws what was found into a folder, and gives it back for the page."""

    def __init__(self, result: AuditResult) -> None:
        self.result = result
        self.folder = result.options.out / "figures"
        self.room = ROOM

    def _picture(self, name: str, figure: Any, alt: str, caption: str, scale: float = 1) -> Picture:
        path = style.save(figure, self.folder / f"{name}.png", svg=True)
        with Image.open(path) as image:
            width, height = (round(scale * side * SCREEN / DRAWN) for side in image.size)
        address = embedded(path)
        for share in REDUCTIONS:
            if len(address) > self.room / 4:
                address = min(address, reduced(path, share), key=len)
        self.room -= len(address)
        return Picture(address, width, height, alt, caption)

    def trade_off(self) -> Picture | str:
        """Or why there is none; nothing where no two models trade a likelihood of pixels."""
        pairs = zip(self.result.models, self.result.evaluations, strict=True)
        models = [model for model, evaluation in pairs if "L_X" in evaluation.metrics or model.is_resnet]
        if len(models) < 2 or all(model.is_resnet for model in models):
            return ""
        try:
            rows = read_rows([self.result.options.out / "evaluation" / audited.folder for audited in models])
        except CandidError as error:
            return str(error)
        alt = "; ".join(
            f"{row['name']}: accuracy {percent(row['accuracy'])}"
            + ("" if row["bits_per_dim"] is None else f", {row['bits_per_dim']:.2f} bits/dim")
            for row in rows
        )
        return self._picture(
            "trade_off",
            comparison_plots.trade_off(rows),
            f"Losses, and accuracy against bits per dimension. {alt}.",
            "What beta trades: likelihood against classification. Dashed lines are ResNets, which have "
            "no likelihood.",
        )

    def mistakes(self, i: int) -> list[Picture]:
        """The worst mistakes of a model: those that are accepted first, then by confidence."""
        model, evaluation = self.result.models[i], self.result.evaluations[i]
        predictions, names = evaluation.predictions, evaluation.class_names
        confidence, predicted = predictions.posterior.max(1), predictions.posterior.argmax(1)
        judged = evaluation.judged.get(evaluation.metrics["part"])
        kinds = [""] * len(predictions) if judged is None else list[str](judged.kinds)
        wrong = np.flatnonzero(predicted != predictions.labels).tolist()
        wrong.sort(key=lambda j: (kinds[j] != "accept", -confidence[j]))
        shown = []
        for j in wrong:
            path = Path(predictions.paths[j])
            address = inline_thumbnail(path, MISTAKE) if path.is_file() else None
            if address is None or len(address) > self.room / 4:
                continue
            self.room -= len(address)
            true, taken = names[int(predictions.labels[j])], names[int(predicted[j])]
            said = f"{true} taken for {taken} ({percent(float(confidence[j]), 0)})"
            verdict = f", {KINDS[judged.kinds[j]].word}" if judged is not None else ""
            where = "/".join(path.parts[-2:])
            alt = f"A photo of the class {true} that {model.name} takes for {taken}."
            shown.append(Picture(address, MISTAKE, MISTAKE, alt, f"{said}{verdict}: {where}"))
            if len(shown) == MISTAKES:
                break
        return shown

    def calibration(self) -> Picture:
        """One panel per model."""
        both, errors = {}, []
        for model, evaluation in zip(self.result.models, self.result.evaluations, strict=True):
            predictions = evaluation.predictions
            both[model.name] = (
                all_bins(predictions.posterior, predictions.labels),
                top_bins(predictions.posterior, predictions.labels),
            )
            errors.append(f"{model.name} {percent(evaluation.metrics['top1_ece'])}")
        return self._picture(
            "calibration",
            comparison_plots.calibration_curves(both),
            "Share right against confidence. Calibration errors of the most probable class: "
            f"{listed(errors)}.",
            "Share of predictions that are right, against the model's confidence.",
        )

    def roc(self) -> Picture | None:
        """One panel per set, one line per model, and one for the control."""
        curves: dict[str, dict[str, Any]] = {}
        areas: dict[str, dict[str, float]] = {}
        for model, evaluation in zip(self.result.models, self.result.evaluations, strict=True):
            detection, metrics = evaluation.detection, evaluation.metrics
            if detection is None or not detection.outside:
                continue
            score = metrics["verdicts"]["score"]
            for name, by_test in detection.curves().items():
                label = f"{model.name}, {score}"
                curves.setdefault(name, {})[label] = by_test[score]
                areas.setdefault(name, {})[label] = metrics["ood"][name][score]["auc"]
                if CONTROL in by_test:  # it needs pixels
                    curves[name][CONTROL] = by_test[CONTROL]
                    areas[name][CONTROL] = metrics["ood"][name][CONTROL]["auc"]
        if not curves:
            return None
        control = False
        for by_test in (*curves.values(), *areas.values()):
            if control := CONTROL in by_test:
                by_test[CONTROL] = by_test.pop(CONTROL)  # last
        text = "; ".join(
            f"{name}: {listed(f'{label} {percent(area)}' for label, area in by_test.items())}"
            for name, by_test in areas.items()
        )
        return self._picture(
            "roc",
            evaluation_plots.roc_curves(curves, areas),
            f"ROC curves. Areas under them: {text}.",
            "How well the score behind the verdicts separates each set from the data's images."
            + (f" {CONTROL} needs no model." if control else ""),
        )

    def zones(self) -> Iterator[Picture]:
        """Where log-likelihoods of all sets lie, of each generative model."""
        for model, evaluation in zip(self.result.models, self.result.evaluations, strict=True):
            detection, own = evaluation.detection, evaluation.model
            if detection is None or not detection.outside or "log_density" not in detection.inside:
                continue
            assert own is not None
            dimensions = math.prod(own.image_shape)
            held_out = detection.held_out["log_density"] / dimensions
            paper = {
                score.name: new_detector(score).fit(held_out)
                for score in detection.scores
                if score.family == "paper"
            }
            others = {
                name: columns["log_density"] / dimensions for name, columns in detection.outside.items()
            }
            label = "log p(x) per dimension (nats)"
            figure = evaluation_plots.ood_zones(held_out, paper, 0.1, others, label)
            means = [f"held-out images {float(held_out.mean()):.2f}"]
            means += [f"{name} {float(values.mean()):.2f}" for name, values in others.items()]
            yield self._picture(
                f"zones-{model.folder}",
                figure,
                f"Histograms of log-likelihoods by {model.name}. Means in nats per dimension: "
                f"{listed(means)}.",
                f"{model.name}: log-likelihoods of held-out images and of the other sets, and what "
                "three scores of the likelihood alone call outliers.",
            )

    def accepted(self) -> Iterator[Picture]:
        """Risk-coverage curves, one for each model."""
        for model, evaluation in zip(self.result.models, self.result.evaluations, strict=True):
            selective = evaluation.metrics["selective"]
            yield self._picture(
                f"risk-coverage-{model.folder}",
                evaluation_plots.risk_coverage(selective),
                f"Wrong share of accepted images against the accepted share by {model.name}. Area (AUGRC): "
                f"{percent(selective['augrc'])}.",
                f"{model.name}: the fewer images are accepted, the fewer of them should be wrong.",
                scale=0.8,
            )

    def corrupted(self) -> Picture | None:
        """One image with all corruptions that were measured."""
        image = self._image()
        if image is None or min(image.shape[1:]) < 8:
            return None
        rows = {
            name: np.concatenate([corrupted(image[None], name, s, draws(0, i).numpy) for s in SEVERITIES])
            for i, name in enumerate(CORRUPTIONS)
            if self.result.corruptions and name in self.result.corruptions.models[0].errors
        }
        return self._picture(
            "corrupted",
            comparison_plots.corruption_grid(image, rows),
            f"An image of the data with {len(rows)} corruptions at severities 1 to 5.",
            "What the corruptions look like, on one image as the model sees it.",
            scale=0.65,
        )

    def _image(self) -> Array | None:
        opinions = [opinion for example in self.result.examples for opinion in example.opinions]
        shown = [
            opinion.examined.evidence.image for opinion in opinions if opinion.examined.evidence is not None
        ]
        if self.result.attacks is not None:
            shown.append(self.result.attacks.models[0].inputs.images[0])
        return shown[0] if shown else None

    def attacks(self) -> Iterator[Picture]:
        """The paper's bars, and one image under attack."""
        attacks = self.result.attacks
        assert attacks is not None
        yield self._picture(
            "attacks",
            attacks_plots.attack_bars(attacks.models),
            "Bars of the size of perturbations, the detection and the uncertainty, for each model, kappa "
            "and d; the numbers are in the tables below.",
            "Size of the perturbations, whether log q(x) separates attacked images from their originals, "
            "and the uncertainty about the wrong class. d > 0: attacks that also fool the detection.",
        )
        yield self._picture(
            "attacked",
            attacks_plots.attack_examples(attacks.models),
            "One image under all attacks with the class it is taken for, and the amplified differences.",
            "One image under all attacks, and below each what was changed, amplified.",
        )

    def explanations(self, name: str) -> Iterator[Picture]:
        """Of one generative model."""
        overview = self.result.overviews[name]
        folder = next(audited.folder for audited in self.result.models if audited.name == name)
        if len(overview.class_names) > 2:  # else the matrix is one number
            closest = overview.pairs[0]
            pair = f"{overview.class_names[closest.first]} and {overview.class_names[closest.second]}"
            yield self._picture(
                f"similarity-{folder}",
                explanation_plots.similarity(overview.similarity),
                f"Matrix of the distances of class means of {name}; the closest are {pair}.",
                f"{name}: how far apart the classes lie in latent space, and the expected uncertainty.",
            )
        shown = [overview.class_names[y] for y in overview.sampled]
        if overview.samples is not None:
            yield self._picture(
                f"samples-{folder}",
                latent_plots.samples(overview.samples, shown, TEMPERATURES),
                f"Images drawn by {name} of the classes {listed(shown)}, at three temperatures.",
                f"{name}: images drawn from the model show what it knows about a class, and what not.",
            )
        if overview.known:
            yield self._picture(
                f"known-{folder}",
                latent_plots.known_photos(overview.known, overview.class_names),
                f"Photos of the classes {listed(shown)} that are kept with {name}.",
                f"{name}: known photos of each class, those nearest to its mean first.",
            )
        if overview.interpolations:
            yield self._picture(
                f"interpolation-{folder}",
                latent_plots.interpolation(overview.interpolations, overview.class_names),
                f"Images on the straight line in the latent space of {name} between pairs of images.",
                f"{name}: from one image to another, in a straight line through latent space.",
            )

    def receptive_fields(self) -> Picture | None:
        """Of all models."""
        if not self.result.fields:
            return None
        widths = []
        for name, field in self.result.fields.items():
            width = field.width_at_half_maximum
            widths.append(f"{name} {'more than the image' if width is None else f'{width:.1f} pixels'}")
        return self._picture(
            "receptive_fields",
            explanation_plots.receptive_fields(self.result.fields),
            f"Sensitivity of features to pixels by distance. Full widths at half maximum: {listed(widths)}.",
            "Which pixels the features of a position depend on.",
        )

    def examinations(self) -> Iterator[tuple[str, list[Picture]]]:
        """For each example image, why it was chosen, and a page of each generative model."""
        for number, example in enumerate(self.result.examples, 1):
            true = "" if example.true_class is None else f" Its true class is '{example.true_class}'."
            pages = []
            for opinion in example.opinions:
                drawn = examine_plots.examination(
                    opinion.examined, opinion.explanation, opinion.model.model.class_names
                )
                pages.append(
                    self._picture(
                        f"example-{number}-{opinion.model.folder}",
                        drawn,
                        "The image, its posteriors, where it lies between classes, and heatmaps.",
                        f"{opinion.model.name}: {opinion.explanation.sentence}",
                    )
                )
            yield f"{example.why[0].upper()}{example.why[1:]}.{true}", pages


def embedded(path: Path) -> str:
    """The figure at ``path`` as an address: the PNG, or the SVG next to it if that is smaller."""
    png, svg = path.read_bytes(), path.with_suffix(".svg").read_bytes()
    return data_uri(png, "png") if len(png) <= len(svg) else data_uri(svg, "svg+xml")


def reduced(path: Path, scale: float = 1) -> str:
    """The figure at ``path`` in ``scale`` of the pixels that a screen has, with losses, as an address."""
    content = io.BytesIO()
    with Image.open(path) as image:
        size = [max(1, round(scale * side * SCREEN / DRAWN)) for side in image.size]
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(content, "JPEG", quality=60)
    return data_uri(content.getvalue(), "jpeg")
