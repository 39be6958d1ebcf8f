"""A report on the photos of a training: wrong labels, photos in two classes, near-duplicates, odd photos."""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from candid._support.numbers import Array
from candid._support.text import as_csv, plural
from candid.data.thumbnails import inline_thumbnail
from candid.inference.predictions import Predictions
from candid.judging.by_class import ByClass
from candid.training.features import Features

SUSPECT = 0.05
"""A label is suspect if its out-of-fold posterior is below this and another class is likely."""
LIKELY = 0.8
SAME = 0.95
"""Cosine of standardised statistics from which on two photos count as near-duplicates."""
FAR = 5.0
"""A photo is odd if its distance outside of the span of the classes is this many deviations above the median.

The deviation is the median one, scaled as for a normal distribution."""
MOST = 60
"""Photos of each kind on the page; the CSV has all of them."""
THUMBNAIL = 128
ROWS = 1024
KINDS = ("label", "conflict", "duplicate", "leak", "odd")
PAIRS = ("conflict", "duplicate", "leak")
"""Kinds of findings that are two photos."""
CSV_COLUMNS = (
    *("path", "given_label", "predicted_label"),
    *("is_label_issue", "label_score", "is_outlier_issue", "outlier_score"),
    *("is_near_duplicate_issue", "near_duplicate_score"),
    *("near_duplicate_of", "near_duplicate_label", "near_duplicate_kind"),
)
"""Columns of photos.csv. The last three are not of cleanlab, which lists the numbers of rows in a set."""
MOST_PAIRS = 3
"""Pairs of classes that a warning names."""


class Finding(NamedTuple):
    """One thing to look at."""

    kind: str
    """"label", "conflict", "leak", "duplicate" or "odd"."""
    path: str
    label: str
    other: str
    """The class that is more probable, or the photo that it resembles."""
    value: float
    """Posterior of the label, cosine, or deviations above the median."""
    other_label: str = ""
    """The label of the photo that it resembles."""


@dataclass(frozen=True)
class DataReport:
    """What is worth a look in the training, held-out and test photos."""

    findings: tuple[Finding, ...]
    class_names: tuple[str, ...]
    by_class: ByClass | None = None
    """Results by class on photos that the head has not seen."""

    @classmethod
    def of(
        cls,
        parts: dict[str, Features],
        predictions: dict[str, Predictions],
        class_names: tuple[str, ...],
        by_class: ByClass | None = None,
        scanned: Sequence[Finding] | None = None,
    ) -> "DataReport":
        """Return the report.

        Args:
            parts: the photos of each part, first those that the head was fitted to.
            predictions: what heads that have not seen them say of the photos of each part.
            class_names: the names of the classes.
            by_class: results by class.
            scanned: wrong labels and odd photos among those that the head was fitted to, if ``parts`` has
                a sample of these alone.
        """
        usual = Usual.of(predictions["train"])
        looked = [part for name, part in predictions.items() if name != "train" or scanned is None]
        findings = list(scanned or ())
        for part in looked:
            findings += [*wrong_labels(part, class_names), *usual.odd(part, class_names)]
        suspects = sorted((each for each in findings if each.kind == "label"), key=lambda each: each.value)
        odd = sorted((each for each in findings if each.kind == "odd"), key=lambda each: -each.value)
        return cls((*suspects, *_duplicates(parts, class_names), *odd), class_names, by_class)

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings of one kind."""
        return [each for each in self.findings if each.kind == kind]

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each kind."""
        return {kind: len(self.of_kind(kind)) for kind in KINDS}

    def sentences(self, folder: Path = Path()) -> list[str]:
        """Return what a user should know at once; ``folder`` has the files of the report."""
        counts, sentences, page = self.counts(), [], folder / "photos.html"
        if counts["conflict"]:
            sentences.append(f"{_conflict_warning(self.of_kind('conflict'))}; see {page}")
        if counts["leak"]:
            sentences.append(
                f"warning: {plural(counts['leak'], 'photo nearly equals', 'photos nearly equal')} a photo of "
                f"another part (training, held-out, test), so that results are too good: see {page}"
            )
        shown = (
            (counts["label"], "label that is probably wrong", "labels that are probably wrong"),
            (counts["duplicate"], "near-duplicate", "near-duplicates"),
            (counts["odd"], "odd photo", "odd photos"),
        )
        if any(count for count, _, _ in shown):
            listed = ", ".join(plural(*each) for each in shown if each[0])
            sentences.append(f"worth a look, in {page} and {page.with_suffix('.csv')}: {listed}")
        return sentences

    def csv(self) -> str:
        """Return one row for each photo with findings, as CSV; the columns have the names of cleanlab.

        Scores lie between 0 and 1, and low ones are bad: the posterior of the given label, 1 / deviations
        above the median of an odd photo, and 1 - cosine of a near-duplicate.
        """
        rows: dict[str, dict[str, object]] = {}
        for each in self.findings:
            row = rows.setdefault(each.path, {"path": each.path, "given_label": each.label})
            if each.kind == "label":
                row |= {"predicted_label": each.other, "is_label_issue": True, "label_score": each.value}
            elif each.kind == "odd":
                row |= {"is_outlier_issue": True, "outlier_score": 1 / each.value}
            else:
                row |= {"is_near_duplicate_issue": True, "near_duplicate_score": max(0.0, 1 - each.value)}
                row |= {"near_duplicate_of": each.other, "near_duplicate_label": each.other_label}
                row["near_duplicate_kind"] = each.kind
        return as_csv(
            [CSV_COLUMNS, *([_cell(row.get(name), name) for name in CSV_COLUMNS] for row in rows.values())]
        )

    def html(self) -> str:
        """Return a page with thumbnails."""
        sections = (
            (
                "label",
                "Labels that are probably wrong",
                "To a head that has not seen the photo, another class is far more probable.",
            ),
            (
                "conflict",
                "Photos in two classes",
                "Each nearly equals a photo with another label: one of the two labels is wrong.",
            ),
            (
                "leak",
                "Photos that nearly equal one of another part",
                "Results on such test or held-out photos are too good: remove one of the two.",
            ),
            (
                "duplicate",
                "Near-duplicates within a part",
                "Training counts both, the levels of verdicts one of them.",
            ),
            ("odd", "Photos that look like none of the others", "Are they photos of these classes?"),
        )
        parts = [_section(title, text, self.of_kind(kind)) for kind, title, text in sections]
        if self.by_class is not None:
            said = "".join(f"<p>{html.escape(each)}</p>" for each in self.by_class.sentences())
            parts.insert(0, f"<section><h2>Results by class</h2>{said}{self.by_class.html()}</section>")
        return PAGE.format(body="\n".join(parts))


def _cell(value: object, name: str) -> object:
    if name.startswith("is_"):
        return bool(value)
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else value


def _conflict_warning(conflicts: list[Finding]) -> str:
    pairs = Counter(" and ".join(sorted((each.label, each.other_label))) for each in conflicts)
    named = [pair for pair, _ in pairs.most_common(MOST_PAIRS)]
    if len(pairs) > MOST_PAIRS:
        named.append(f"{len(pairs) - MOST_PAIRS} more")
    are, each = ("is", "it") if len(conflicts) == 1 else ("are", "each")
    return (
        f"warning: {plural(len(conflicts), 'photo')} {are} in two classes ({', '.join(named)}): one label of "
        f"{each} is wrong"
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Report on the photos</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 1rem; }}
td, th {{ padding: 3px 8px; text-align: right; border-bottom: 1px solid #8884; font-weight: normal; }}
th[scope=row], th:first-child {{ text-align: left; }}
td.right {{ font-weight: bold; }}
section div {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
figure {{ margin: 0; width: 10rem; overflow-wrap: anywhere; font-size: 12px; }}
figure img {{ height: 8rem; max-width: 100%; object-fit: contain; display: block; border-radius: 4px; }}
</style></head><body><h1>Report on the photos</h1>
{body}
</body></html>
"""


def _section(title: str, text: str, findings: list[Finding]) -> str:
    count = len(findings)
    if not findings:
        return f"<section><h2>{title}: none</h2></section>"
    rest = f" The first {MOST} of {count}; all are in photos.csv." if count > MOST else ""
    figures = "".join(map(_figure, findings[:MOST]))
    return f"<section><h2>{title}: {count}</h2><p>{text}{rest}</p><div>{figures}</div></section>"


def _figure(each: Finding) -> str:
    pictures = _picture(each.path) + (_picture(each.other) if each.kind in PAIRS else "")
    if each.kind == "label":
        text = f"labelled {each.label} ({100 * each.value:.1f} %), looks like {each.other}"
    elif each.kind == "odd":
        text = f"labelled {each.label}; {each.value:.1f} deviations from the median"
    else:
        other = f"{Path(each.other).parent.name}/{Path(each.other).name}"
        text = f"{each.label}; nearly equals {other}, labelled {each.other_label}"
    place = Path(each.path)
    return (
        f"<figure>{pictures}<figcaption>{html.escape(f'{place.parent.name}/{place.name}')}<br>"
        f"{html.escape(text)}</figcaption></figure>"
    )


def _picture(path: str) -> str:
    picture = inline_thumbnail(Path(path), THUMBNAIL)
    return "" if picture is None else f'<img alt="" src="{picture}">'


class Usual(NamedTuple):
    """How far photos usually are outside of the span of the classes."""

    centre: float
    """The median."""
    deviation: float
    """The median deviation from it, scaled as for a normal distribution."""

    @classmethod
    def of(cls, part: Predictions) -> "Usual":
        """Measure it on photos that were scored out of fold."""
        outside = _outside(part)
        centre = _median(outside)
        return cls(centre, 1.4826 * max(_median(np.abs(outside - centre)), 1e-12))

    def odd(self, part: Predictions, class_names: Sequence[str]) -> list[Finding]:
        """Return the photos that are far more outside than usual."""
        z = (_outside(part) - self.centre) / self.deviation
        return [
            Finding("odd", part.paths[i], class_names[int(part.labels[i])], "", float(z[i]))
            for i in np.flatnonzero(z > FAR).tolist()
        ]


def wrong_labels(part: Predictions, class_names: Sequence[str]) -> list[Finding]:
    """Return the photos whose label is improbable while another class is likely."""
    posterior = part.posterior
    labelled = np.take_along_axis(posterior, part.labels[:, None], 1)[:, 0]
    best, predicted = posterior.max(1), posterior.argmax(1)
    return [
        Finding(
            "label",
            part.paths[i],
            class_names[int(part.labels[i])],
            class_names[int(predicted[i])],
            float(labelled[i]),
        )
        for i in np.flatnonzero((labelled < SUSPECT) & (best > LIKELY)).tolist()
    ]


def _outside(part: Predictions) -> Array:
    return part.columns["novelty"][:, 2].astype(float)


def _median(values: Array) -> float:
    """Return the lower of the two middle values, so that it is one of them."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def standardised(values: Array, by: Array) -> Array:
    """Return statistics as directions, (N, D), in units of those of the photos ``by``: for cosines."""
    x = (values - by.mean(0)) / np.maximum(by.std(0, ddof=1), 1e-6)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return x


def first_alike(x: Array, same: float = SAME) -> Array:
    """Return for each photo the number of the first one that it nearly equals, or its own, (N,).

    Args:
        x: directions of standardised statistics, (N, D).
        same: the cosine from which on two photos nearly equal each other.
    """
    first = np.arange(len(x))
    for start in range(0, len(x), ROWS):
        rows = first[start : start + ROWS]
        near = x[rows] @ x[: start + ROWS].T >= same
        near[np.arange(len(rows)), rows] = True
        first[start : start + ROWS] = near.argmax(1)
    while (first[first] != first).any():
        first = first[first]
    return first


def _duplicates(parts: dict[str, Features], class_names: tuple[str, ...]) -> list[Finding]:
    """Return each photo that nearly equals an earlier one.

    It is a conflict if that one has another label, else a leak if that one is in another part.
    """
    train = parts["train"].values
    names = [name for part in parts.values() for name in part.names]
    labels = np.concatenate([part.labels for part in parts.values()])
    places = [place for place, part in parts.items() for _ in part.names]
    x = np.concatenate([part.values for part in parts.values()])
    x = standardised(x, train)
    findings: list[Finding] = []
    for start in range(0, len(x), ROWS):
        rows = x[start : start + ROWS]
        near = np.tril(rows @ x[: start + len(rows)].T, start - 1)  # each with those before it
        for i in np.flatnonzero(near.max(1) >= SAME).tolist():
            row = start + i
            apart = np.where(labels[: near.shape[1]] != labels[row], near[i], 0)
            conflict = float(apart.max()) >= SAME
            j = int((apart if conflict else near[i]).argmax())
            kind = "conflict" if conflict else "duplicate" if places[row] == places[j] else "leak"
            label, other = (class_names[int(labels[k])] for k in (row, j))
            findings.append(Finding(kind, names[row], label, names[j], float(near[i, j]), other))
    return findings
