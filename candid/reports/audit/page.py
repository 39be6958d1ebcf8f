"""The page of an audit: a summary in words, then every study with its figure, its table and its command."""

from collections.abc import Iterator, Sequence
from html import escape

from candid._support.tables import Cell, area_cell
from candid._support.text import FIGURES, number
from candid._support.version import __version__
from candid.reports.audit import commands
from candid.reports.audit.chart import dots
from candid.reports.audit.grades import CRITERIA, Finding, listed, percent
from candid.reports.audit.markup import Page, badge, marked
from candid.reports.audit.pictures import Pictures
from candid.reports.audit.record import missing, side_by_side
from candid.reports.audit.run import Audit
from candid.robustness.attacks.tables import NOTES, attack_tables
from candid.robustness.corruptions.tables import table as corruption_table

LIKELIHOOD = ("accuracy", "top5_accuracy", "cross_entropy", "bits_per_dim", "L_X", "L_Y")
ATTACKS = ("model", "d", "wrong", "success (%)", "8-bit (%)", "L2 median", "RMS (levels)", "confidence (%)")
"""Columns that are shown beside those of the two-tailed detection; the files have them all."""
CALIBRATION = ("ece", "mce", "oce", "top1_ece")


def page(found: Audit, judged: dict[str, list[Finding]]) -> str:
    """As HTML that needs nothing else."""
    names = [subject.name for subject in found.subjects]
    html = Page(f"Audit of {listed(names)}")
    pictures = Pictures(found)
    _summary(html, found, judged)
    _models(html, found)
    _accuracy(html, found, pictures)
    _calibration(html, found, pictures)
    _out_of_distribution(html, found, pictures)
    _corruptions(html, found, pictures)
    _attacks(html, found, pictures)
    _explanations(html, found, pictures)
    _examples(html, found, pictures)
    _criteria(html)
    return html.text()


def _summary(html: Page, found: Audit, judged: dict[str, list[Finding]]) -> None:
    html.section("summary", "Summary")
    first, request = found.evaluations[0].metrics, found.request
    html.paragraph(
        f"On {first['images']:,} images of {request.data} ({first['part']}), by candid {__version__}.", "soft"
    )
    if request.quick or request.images is not None or request.corruption_images:
        html.paragraph(_sampled(found), "note")
    aspects = [finding.aspect for finding in next(iter(judged.values()))]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in judged)
    rows = "".join(
        f'<tr><th scope="row">{escape(aspect)}</th>'
        + "".join(f"<td>{_verdict(findings[i])}</td>" for findings in judged.values())
        + "</tr>\n"
        for i, aspect in enumerate(aspects)
    )
    html.add(
        '<div class="wide" role="region" aria-labelledby="verdicts" tabindex="0"><table class="summary">',
        '<caption id="verdicts">The verdict on each aspect, and the figure that it rests on; '
        '<a href="#criteria">how verdicts are made</a> is below.</caption>',
        f'<thead><tr><th scope="col">aspect</th>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>',
    )
    if len(found.subjects) > 1:
        html.heading("Side by side")
        html.items(side_by_side(found))
    lacking = missing(found)
    for name, findings in judged.items():
        html.heading(f"{name}, in words")
        html.add("<dl>")
        for finding in findings:
            html.add(f"<dt>{escape(finding.aspect)} {badge(finding.grade)}</dt>")
            html.add(f"<dd>{marked(finding.sentence)}</dd>")
        html.add("</dl>")
        if lacking[name]:
            html.paragraph("What is missing, and why:", "label")
            html.items(lacking[name])


def _verdict(finding: Finding) -> str:
    return f'{badge(finding.grade)}<span class="figure">{marked(finding.figure)}</span>'


def _sampled(found: Audit) -> str:
    request = found.request
    parts = [f"at most {request.images:,} images of each set"] if request.images else []
    parts += [f"{request.corruption_images:,} for each corruption"] if request.corruption_images else []
    parts += [f"{request.attack_images:,} attacked images"] if found.attacked else []
    kind = "A quick look" if request.quick else "A sample"
    return (
        f"{kind}: {listed(parts or ['few images'])}. Where there are more images, figures vary more than "
        "they would on all of them; intervals say by how much."
    )


def _models(html: Page, found: Audit) -> None:
    html.section("models", "The models")
    rows = []
    for subject in found.subjects:
        channels, height, width = subject.model.image_shape
        parameters = sum(each.numel() for each in subject.model.parameters())
        rows.append(
            [
                subject.name,
                "generative" if subject.is_generative else "ResNet",
                "–" if subject.beta is None else number(subject.beta),
                f"{parameters:,}",
                f"{channels} x {height} x {width}",
                f"{subject.model.config.classes:,}",
                f"{subject.held_out:,}" if subject.held_out else "none",
                str(subject.path),
            ]
        )
    head = ["model", "kind", "beta", "parameters", "images", "classes", "held-out images", "where"]
    html.table("What was audited", head, rows)
    names = found.subjects[0].model.class_names
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    html.paragraph(f"Classes: {', '.join(names[:20])}{more}.", "soft")


def _accuracy(html: Page, found: Audit, pictures: Pictures) -> None:
    html.section("accuracy", "Accuracy and likelihood")
    html.how_to_read(
        "Accuracy and cross-entropy say how well classes are told apart, bits/dim how well images are "
        "described (lower is better; 8 is no knowledge at all); in brackets are 95 % bootstrap intervals."
    )
    drawn = pictures.trade_off()
    if not isinstance(drawn, str):
        html.picture(drawn)
    elif len(found.subjects) > 1:
        html.paragraph(f"No figure of what beta trades: {drawn}", "soft")
    html.table("Accuracy and likelihood", ["figure", *_names(found)], _figures(found, LIKELIHOOD))
    crops = [each.metrics["ten_crop"] for each in found.evaluations if "ten_crop" in each.metrics]
    if crops:
        row = ["top-1 accuracy, ten crops", *(percent(each["accuracy"]) for each in crops)]
        html.table("Posteriors averaged over ten crops", ["figure", *_names(found)], [row])
    lines = commands.evaluations(found)
    html.commands(lines + ([] if isinstance(drawn, str) else commands.comparison(found)))


def _calibration(html: Page, found: Audit, pictures: Pictures) -> None:
    html.section("calibration", "Calibration")
    html.how_to_read(
        "Of all predictions with 80 % confidence, 80 % should be right: the diagonal. Below it the model "
        "is over-confident. The expected calibration error (ECE) is the mean distance from it, MCE the "
        "largest; OCE is how many times more often than it may it is wrong when it is sure."
    )
    html.picture(pictures.calibration())
    rows = list(_figures(found, CALIBRATION))
    scaled = [each.metrics.get("temperature_scaled") for each in found.evaluations]
    rows.append(
        [
            "ECE, top class, with temperature",
            *(
                "–" if s is None else f"{100 * s['top1_ece']:.2f} % (T = {s['temperature']:.2f})"
                for s in scaled
            ),
        ]
    )
    html.table("Calibration errors", ["figure", *_names(found)], rows)
    html.commands(commands.evaluations(found))


def _names(found: Audit) -> list[str]:
    return [subject.name for subject in found.subjects]


def _figures(found: Audit, keys: Sequence[str]) -> Iterator[list[str]]:
    for key in keys:
        label, factor, form = FIGURES[key]
        cells = []
        for metrics in (each.metrics for each in found.evaluations):
            value, ends = metrics.get(key), metrics["intervals"].get(key)
            if value is None or ends is None:
                cells.append("never so sure" if key == "oce" else "–")
                continue
            low, high = (form.format(factor * end).removesuffix(" %") for end in ends)
            cells.append(f"{form.format(factor * value)} ({low} to {high})")
        if set(cells) != {"–"}:
            yield [label, *cells]


def _out_of_distribution(html: Page, found: Audit, pictures: Pictures) -> None:
    html.section("out-of-distribution", "Out of distribution")
    judged = [
        (subject, each)
        for subject, each in zip(found.subjects, found.evaluations, strict=True)
        if each.detection is not None
    ]
    if not judged:
        html.paragraph(
            "No model has held-out scores, so there are no p-values, verdicts and tests: see the summary."
        )
        return
    html.how_to_read(
        "A test gives each image a p-value for 'this is like the images I was trained on'. At a level of "
        "5 %, 5 % of usual images are false alarms, whatever the model is worth; what it is worth is how "
        "many other images it finds, which the area under the ROC curve measures: 100 % is perfect, 50 % "
        "chance."
    )
    html.table(
        "False alarms: share of the data's images with a p-value at most the level (%)",
        ["model, test", "level 1 %", "level 5 %", "level 10 %"],
        [
            [f"{subject.name}, {test}", *(f"{100 * rates[level]:.1f}" for level in ("0.01", "0.05", "0.1"))]
            for subject, each in judged
            for test in [each.metrics["verdicts"]["test"]]
            for rates in [each.metrics["false_positives"][test]]
        ],
    )
    drawn = pictures.roc()
    if drawn is None:
        html.paragraph(
            "No other images were given: name some with --ood NAME=PATH to see whether they are found."
        )
    else:
        html.picture(drawn)
        for subject, each in judged:
            html.table(*_areas(subject.name, each.metrics["ood"], each.metrics["false_positives"]))
        for zone in pictures.zones():
            html.picture(zone)
    html.table(
        "Verdicts on each set of images (%): accepted, ambiguous between several classes, or novel",
        ["model, images", "accept", "ambiguous", "novel"],
        [
            [
                f"{subject.name}, {name}",
                *(f"{100 * shares[kind]:.1f}" for kind in ("accept", "ambiguous", "novel")),
            ]
            for subject, each in judged
            for name, shares in each.metrics["verdicts"]["sets"].items()
        ],
    )
    html.commands(commands.evaluations(found))


def _areas(
    name: str, sets: dict[str, dict[str, dict[str, float]]], tests: dict[str, dict[str, float]]
) -> tuple[str, list[str], list[list[Cell | str]]]:
    rows: list[list[Cell | str]] = [
        [test, *(area_cell(by_test[test]["auc"]) for by_test in sets.values()), f"{100 * rates['0.05']:.1f}"]
        for test, rates in tests.items()
    ]
    caption = f"{name}: areas under the ROC curve (%) of all tests, and false alarms at a level of 5 % (%)"
    return caption, ["test", *sets, "false alarms"], rows


def _corruptions(html: Page, found: Audit, pictures: Pictures) -> None:
    html.section("corruptions", "Corruptions")
    if not found.sweeps:
        html.paragraph(found.absent["corruptions"])
        return
    severities = listed(map(str, found.request.severities))
    html.how_to_read(
        "Each image is corrupted in the ways of ImageNet-C. A mark far to the right of its dashed line is "
        "a corruption that the model does not stand; a high area under the ROC curve in the table means "
        "that it notices."
    )
    corruptions = list(found.sweeps[0].errors)
    errors = {each.name: list(each.mean_errors.values()) for each in found.sweeps}
    clean = {each.name: each.clean_error for each in found.sweeps}
    means = listed(f"{each.name} {percent(each.mean_error)}" for each in found.sweeps)
    labels = [name.replace("_", " ") for name in corruptions]
    html.drawing(
        dots(labels, errors, clean, f"Errors by corruption. Means: {means}. The table below has more."),
        f"Share of images that are wrong, by corruption: means over severity {severities}.",
    )
    (_, *head), rows = corruption_table(found.sweeps, found.reference)
    relative = "" if found.reference is None else f"; mCE relative to {found.reference.name}"
    html.table(
        f"Errors{relative}; below, areas under the ROC curve of each model's test, by corruption (%)",
        ["figure", *(row[0][0] for row in rows)],
        [[name, *(row[i] for row in rows)] for i, name in enumerate(head, 1)],
    )
    drawn = pictures.corrupted()
    if drawn is not None:
        html.picture(drawn)
    html.commands(commands.sweep(found))


def _attacks(html: Page, found: Audit, pictures: Pictures) -> None:
    html.section("attacks", "Attacks")
    if found.attacked is None:
        html.paragraph(found.absent["attacks"])
        return
    html.how_to_read(
        "Each image is led to a random wrong class with the smallest change that is found. A detection is "
        "worth no more than what is left of it when the attack knows of it: the columns 'adaptive'. Below "
        "50 %, attacked images look more usual than the originals."
    )
    for drawn in pictures.attacks():
        html.picture(drawn)
    for caption, (head, rows) in attack_tables(found.attacked.found, found.attacked.request).items():
        kept = [i for i, name in enumerate(head) if name in ATTACKS or i >= len(head) - 3]
        html.table(
            f"Attacks with {caption}", [head[i] for i in kept], [[row[i] for i in kept] for row in rows]
        )
    html.items(NOTES)
    html.commands(commands.attacks(found))


def _explanations(html: Page, found: Audit, pictures: Pictures) -> None:
    html.section("explanations", "What the models have learned")
    for study, reason in found.absent.items():
        if study.startswith("explanations"):
            html.paragraph(reason)
    if not found.overviews:
        return
    html.how_to_read(
        "Classes whose means lie close in latent space are hard to tell apart: the expected uncertainty "
        "follows from the distance alone, the measured one is that of real images of the two classes."
    )
    for name, overview in found.overviews.items():
        html.heading(name)
        for drawn in pictures.explanations(name):
            html.picture(drawn)
        rows = [
            [
                listed(pair["classes"]),
                f"{pair['distance']:.2f}",
                f"{100 * pair['expected_uncertainty']:.3g}",
                "–" if pair["measured_uncertainty"] is None else f"{100 * pair['measured_uncertainty']:.3g}",
            ]
            for pair in overview.record()["closest_pairs"]
        ]
        head = ["classes", "distance of means (σ)", "expected uncertainty (%)", "measured (%)"]
        html.table(f"{name}: the closest classes", head, rows)
    fields = pictures.receptive_fields()
    if fields is not None:
        html.heading("Receptive fields")
        html.picture(fields)
    html.commands(commands.explanations(found))


def _examples(html: Page, found: Audit, pictures: Pictures) -> None:
    if not found.examples and "examples" not in found.absent:
        return
    html.section("examples", "Some images, one by one")
    if not found.examples:
        html.paragraph(found.absent["examples"])
        return
    html.how_to_read(
        "Above, the image, its most probable classes and where it lies between them; below, which parts "
        "speak for (red) and against (blue) each class. The values of a heatmap add up to the logarithm "
        "of the posterior in its corner."
    )
    for title, pages in pictures.examinations():
        html.heading(title)
        if not pages:
            html.paragraph("No model could make anything of it.")
        for drawn in pages:
            html.picture(drawn)
    html.commands(commands.examinations(found))


def _criteria(html: Page) -> None:
    html.section("criteria", "How verdicts are made")
    html.paragraph(
        "Verdicts are rules of thumb, the same for all models and data. They sum up the studies above; "
        "they do not replace them."
    )
    html.table("What the words mean", ["aspect", "rule"], list(CRITERIA.items()), "prose")
