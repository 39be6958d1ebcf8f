"""Photos: what bundled models say of them, and a classifier of clothes that meets hats and is taught them."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from candid._support import __version__
from candid._support.progress import Progress
from candid._support.text import listed
from candid.data.thumbnails import data_uri, inline_thumbnail
from candid.judging.examine import examine
from candid.judging.group import group, sort_into
from candid.reports.demo import SAMPLES
from candid.reports.pages import environment
from candid.training.teach import teach
from candid.training.train import train
from candid.trust.verdict import KINDS, Examination

BUNDLED = {
    "everyday": "knows 1000 everyday kinds of things. A moose and a blood cell are not among them.",
    "waste": "knows cardboard, glass, metal, paper, plastic and trash. A cat is none of these.",
}
"""Models that look at the sample photos in a folder of the same name."""
NEW = "hat"
TAUGHT = 10
"""Hats that the model is taught with; it is then shown the others."""
SHOWN = 10

Show = Callable[[Sequence[Examination]], None]
"""Prints a line for each image."""


POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Nothing is loaded from anywhere, and no script runs."""
SIZE = 168
"""Pixels of a photo on the page."""


@dataclass(frozen=True)
class Card:
    """A photo and what a model says of it."""

    photo: str
    """As a data URI."""
    name: str
    examination: Examination

    @classmethod
    def of(cls, examination: Examination) -> "Card":
        """Return the card of a file that was examined."""
        path = Path(examination.path)
        return cls(inline_thumbnail(path, SIZE) or "", path.name, examination)

    @property
    def tone(self) -> str:
        """The colour of the verdict."""
        verdict = self.examination.verdict
        return "unknown" if verdict is None else KINDS[verdict].tone

    @property
    def says(self) -> str:
        """The class set of an ambiguous image, else the most probable class."""
        named = self.examination.classes or ()
        if self.examination.verdict == "ambiguous" and len(named) > 1:
            return " or ".join(named[:2]) + (" …" if len(named) > 2 else "")
        return self.examination.label


@dataclass(frozen=True)
class Chapter:
    """One step of the demonstration."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs."""
    cards: Sequence[Card] = ()
    figures: Sequence[tuple[Path, str]] = ()
    """Files and their captions."""
    commands: Sequence[str] = ()


def page(chapters: Sequence[Chapter], next_steps: Sequence[tuple[str, str]]) -> str:
    """Return the page.

    Args:
        chapters: what was done.
        next_steps: commands that can be copied, each with what it does.
    """
    templates = environment("candid.reports.demo", "candid.reports.audit")
    templates.filters["data_uri"] = lambda path: data_uri(Path(path).read_bytes(), "png")
    template = templates.get_template("demo.html.j2")
    return template.render(chapters=chapters, next_steps=next_steps, policy=POLICY, version=__version__)


def copy_samples(folder: Path) -> Path:
    """Copy the sample photos into ``folder``, where commands can find them, and return it."""
    shutil.copytree(SAMPLES, folder, ignore=shutil.ignore_patterns("*.py*", "*.md"), dirs_exist_ok=True)
    return folder


def bundled_models(samples: Path, program: str, progress: Progress, show: Show) -> list[Chapter]:
    """Return what bundled models say of sample photos."""
    chapters = []
    for name, knows in BUNDLED.items():
        progress.log(f"\nThe bundled model '{name}' {knows}")
        examinations = examine(name, samples / name)
        show(examinations)
        text = (f"The model {knows} {_promised(examinations)}",)
        command = f"{program} examine {name} {samples / name}"
        title = f"The bundled model '{name}'"
        chapters.append(
            Chapter(title, text, [Card.of(examined) for examined in examinations], commands=[command])
        )
    return chapters


def clothes(samples: Path, out: Path, program: str, progress: Progress, show: Show) -> list[Chapter]:
    """Train a classifier of clothes, show it hats, group them, teach them; return what happened."""
    photos, hats = samples / "clothes", sorted((samples / "hats").glob("*.jpg"))
    run, taught, sorted_into = out / "model", out / "with-hats", out / "sorted"
    progress.log("\nA classifier of your own: four kinds of clothes, 280 photos.")
    trained = train(str(photos), out=run, progress=progress)
    progress.log(f"{100 * trained.results['test']['accuracy']:.0f} % of the test photos are right.")

    progress.log("\nNow it sees hats, which it has never seen.")
    first = examine(run, hats)
    show(first[:SHOWN])
    progress.log(_counted(first))
    grouped = group(run, hats)
    sort_into(grouped.places(), sorted_into)
    kinds = listed([f"{kind.name} ({len(kind.members)} photos)" for kind in grouped.groups])
    progress.log(f"What is novel is grouped: {kinds}, in {sorted_into}.")

    progress.log(f"\nIt is taught the class '{NEW}' with {TAUGHT} of these photos.")
    teaching = [Path(examined.path) for examined in first if examined.verdict == "novel"][:TAUGHT]
    others = [hat for hat in hats if hat not in teaching]
    lesson = teach(run, {NEW: teaching}, out=taught)
    price = lesson.sentences()[-1]
    progress.log(price)
    second = examine(taught, others)
    show(second[:SHOWN])
    right = sum(examined.label == NEW for examined in second)
    progress.log(f"{right} of the {len(second)} other hats are recognised. {_counted(second)}")

    names, again = listed(lesson.model.class_names[:-1]), out / "again"
    surest = max(first, key=lambda examined: (examined.verdict == "novel", examined.confidence))
    return [
        Chapter(
            "A classifier of your own",
            (
                f"280 photos of {names}. {100 * trained.results['test']['accuracy']:.0f} % of the photos "
                "that were kept for testing are right.",
                f"Then it sees hats, which it has never seen. {_counted(first)} It is "
                f"{100 * surest.confidence:.1f} % certain that one of them is '{surest.label}': a posterior "
                "compares known classes, and can't say that none of them fits. The p-value can. "
                f"{_promised(first)}",
                f"What is novel is grouped: {kinds}.",
            ),
            [Card.of(examined) for examined in first[:SHOWN]],
            commands=[
                f"{program} train {photos} --out {again}",
                f"{program} examine {again} {samples / 'hats'}",
                f"{program} group {again} {samples / 'hats'} --sort-into {again}-sorted",
            ],
        ),
        Chapter(
            "A new class in seconds",
            (
                f"{TAUGHT} hats are enough, without the photos of clothes: {right} of {len(second)} other "
                f"hats are recognised. {_counted(second)}",
                f"{price[0].upper()}{price[1:]}.",
            ),
            [Card.of(examined) for examined in second[:SHOWN]],
            commands=[f"{program} teach {again} {NEW}={again}-sorted/unknown-1 --out {again}-with-hats"],
        ),
    ]


def _promised(examinations: Sequence[Examination]) -> str:
    """Return what the verdicts promise, in one line."""
    promises = examinations[0].promises
    return "" if promises is None else promises.plain()


def _counted(examinations: Sequence[Examination]) -> str:
    """Return how many photos have each verdict, as a sentence."""
    counts = Counter(
        "accepted" if examined.verdict == "accept" else str(examined.verdict) for examined in examinations
    )
    return (
        f"Of {len(examinations)} photos, {listed([f'{n} are {kind}' for kind, n in counts.most_common()])}."
    )
