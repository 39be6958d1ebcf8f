"""A report on the photos of a training: wrong labels, photos in two classes, near-duplicates, odd photos."""

import html
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from candid._support.tables import as_csv
from candid._support.text import plural
from candid.data.thumbnails import inline_thumbnail
from candid.inference.predictions import Predictions
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

    @classmethod
    def of(
        cls,
        parts: dict[str, Features],
        predictions: dict[str, Predictions],
        class_names: tuple[str, ...],
    ) -> "DataReport":
        """Return the report.

        Args:
            parts: the photos of each part, first those that the head was fitted to.
            predictions: what heads that have not seen them say of the photos of each part.
            class_names: the names of the classes.
        """
        found = [each for part in predictions.values() for each in _labels(part, class_names)]
        rest = {name: part.columns["novelty"][:, 2].double() for name, part in predictions.items()}
        known = rest["train"]
        deviation = 1.4826 * (known - known.median()).abs().median().clamp(min=1e-12)
        odd = [
            Finding(
                "odd", predictions[name].paths[i], class_names[int(parts[name].labels[i])], "", float(z[i])
            )
            for name, z in ((name, (each - known.median()) / deviation) for name, each in rest.items())
            for i in (z > FAR).nonzero().flatten().tolist()
        ]
        found = sorted(found, key=lambda each: each.value) + _duplicates(parts, class_names)
        return cls((*found, *sorted(odd, key=lambda each: -each.value)), class_names)

    def of_kind(self, kind: str) -> list[Finding]:
        """Return the findings of one kind."""
        return [each for each in self.findings if each.kind == kind]

    def counts(self) -> dict[str, int]:
        """Return the number of findings of each kind."""
        return {kind: len(self.of_kind(kind)) for kind in KINDS}

    def sentences(self) -> list[str]:
        """Return what a user should know at once."""
        counts, found = self.counts(), []
        if counts["conflict"]:
            found.append(_conflict_warning(self.of_kind("conflict")))
        if counts["leak"]:
            found.append(
                f"warning: {plural(counts['leak'], 'photo nearly equals', 'photos nearly equal')} a photo of "
                "another part (training, held-out, test), so that results are too good: see photos.html"
            )
        shown = (
            (counts["label"], "label that is probably wrong", "labels that are probably wrong"),
            (counts["duplicate"], "near-duplicate", "near-duplicates"),
            (counts["odd"], "odd photo", "odd photos"),
        )
        if any(count for count, _, _ in shown):
            listed = ", ".join(plural(*each) for each in shown if each[0])
            found.append(f"worth a look, in photos.html and photos.csv: {listed}")
        return found

    def csv(self) -> str:
        """Return all findings as CSV."""
        rows = ((*each[:4], f"{each.value:.4f}", each.other_label) for each in self.findings)
        return as_csv([Finding._fields, *rows])

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
            ("duplicate", "Near-duplicates within a part", "They count twice."),
            ("odd", "Photos that look like none of the others", "Are they photos of these classes?"),
        )
        parts = [_section(title, text, self.of_kind(kind)) for kind, title, text in sections]
        return PAGE.format(body="\n".join(parts))


def _conflict_warning(found: list[Finding]) -> str:
    pairs = Counter(" and ".join(sorted((each.label, each.other_label))) for each in found)
    named = [pair for pair, _ in pairs.most_common(MOST_PAIRS)]
    if len(pairs) > MOST_PAIRS:
        named.append(f"{len(pairs) - MOST_PAIRS} more")
    are, each = ("is", "it") if len(found) == 1 else ("are", "each")
    return (
        f"warning: {plural(len(found), 'photo')} {are} in two classes ({', '.join(named)}): one label of "
        f"{each} is wrong; see photos.html"
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Report on the photos</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #1c2330; }}
section div {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
figure {{ margin: 0; width: 10rem; overflow-wrap: anywhere; font-size: 12px; }}
figure img {{ height: 8rem; max-width: 100%; object-fit: contain; display: block; border-radius: 4px; }}
</style></head><body><h1>Report on the photos</h1>
{body}
</body></html>
"""


def _section(title: str, text: str, found: list[Finding]) -> str:
    if not found:
        return f"<section><h2>{title}: none</h2></section>"
    more = f" The first {MOST} of {len(found)}; all are in photos.csv." if len(found) > MOST else ""
    figures = "".join(map(_figure, found[:MOST]))
    return f"<section><h2>{title}: {len(found)}</h2><p>{text}{more}</p><div>{figures}</div></section>"


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
    found = inline_thumbnail(Path(path), THUMBNAIL)
    return "" if found is None else f'<img alt="" src="{found}">'


def _labels(found: Predictions, class_names: tuple[str, ...]) -> list[Finding]:
    """Return the photos whose label is improbable while another class is likely."""
    own = found.posterior.gather(1, found.labels[:, None])[:, 0]
    best, predicted = found.posterior.max(1)
    return [
        Finding(
            "label",
            found.paths[i],
            class_names[int(found.labels[i])],
            class_names[int(predicted[i])],
            float(own[i]),
        )
        for i in ((own < SUSPECT) & (best > LIKELY)).nonzero().flatten().tolist()
    ]


def _duplicates(parts: dict[str, Features], class_names: tuple[str, ...]) -> list[Finding]:
    """Return each photo that nearly equals an earlier one.

    It is a conflict if that one has another label, else a leak if that one is in another part.
    """
    train = parts["train"].values
    values = torch.cat([each.values for each in parts.values()])
    names = [name for each in parts.values() for name in each.names]
    labels = torch.cat([each.labels for each in parts.values()])
    place = [part for part, each in parts.items() for _ in each.names]
    x = torch.nn.functional.normalize((values - train.mean(0)) / train.std(0).clamp(min=1e-6))
    found: list[Finding] = []
    for start in range(0, len(x), ROWS):
        rows = x[start : start + ROWS]
        near = (rows @ x[: start + len(rows)].T).tril(start - 1)  # each with those before it
        for i in (near.amax(1) >= SAME).nonzero().flatten().tolist():
            row = start + i
            apart = near[i].where(labels[: near.shape[1]] != labels[row], 0)
            conflict = float(apart.max()) >= SAME
            j = int((apart if conflict else near[i]).argmax())
            kind = "conflict" if conflict else "duplicate" if place[row] == place[j] else "leak"
            own, other = (class_names[int(labels[k])] for k in (row, j))
            found.append(Finding(kind, names[row], own, names[j], float(near[i, j]), other))
    return found
