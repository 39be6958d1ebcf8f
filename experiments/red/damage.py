"""Damage to files: random edits of JSON and flips of single bits, and what becomes of a result then."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from candid import CandidError
from experiments.red.attack import check

ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    "x" * 5000,
    "\x1b]0;owned\x07",
    -1,
    0,
    10**9,
    1e308,
    -0.5,
    [],
    {},
    ["a"],
    {"a": 1},
    [[["a"]]],
)
"""Values to put in the place of others."""
HEADER = 400
"""Half of all flips are in this many bytes at the start: the rest of a file is often all the same."""


@dataclass(frozen=True)
class Subject:
    """A file, and how a result comes from it."""

    file: Path
    observe: Callable[[], Any]
    """Returns the result, or raises a CandidError."""
    kind: str


@dataclass
class Outcomes:
    """What became of damaged files."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    """Results that changed without a word, and exceptions that are no sentences."""

    def add(self, subject: Subject, truth: Any, damage: str) -> None:
        """Look at what the damaged ``subject`` gives."""
        try:
            found = subject.observe()
        except CandidError as error:
            self.counts["refused"] += 1
            if not str(error).strip() or "\n" in str(error) or len(str(error)) > 1000:
                self.broken.append(f"{subject.kind}, {damage}: no sentence: {str(error)[:200]!r}")
            return
        except Exception as error:
            self.broken.append(f"{subject.kind}, {damage}: {type(error).__name__}: {str(error)[:200]}")
            return
        if found == truth:
            self.counts["the same result"] += 1
        else:
            self.broken.append(f"{subject.kind}, {damage}: another result without a word")

    def report(self) -> str:
        """Return the counts; raise if a promise is broken."""
        check(not self.broken, f"{len(self.broken)} broken, such as {self.broken[:5]}")
        return f"{self.counts.total()}: " + ", ".join(
            f"{n} {what}" for what, n in sorted(self.counts.items())
        )


@contextmanager
def restored(file: Path) -> Iterator[bytes]:
    """Yield the content of a file, and write it back at the end."""
    content = file.read_bytes()
    try:
        yield content
    finally:
        file.write_bytes(content)


def flips(subjects: list[Subject], count: int, seed: int = 0) -> Outcomes:
    """Flip one bit at a time, ``count`` times in all, and look at the results."""
    randomness, found = random.Random(seed), Outcomes()
    for number, subject in enumerate(subjects):
        truth = subject.observe()
        with restored(subject.file) as content:
            for turn in range(len(range(number, count, len(subjects)))):
                place = randomness.randrange(min(HEADER, len(content)) if turn % 2 else len(content))
                bit = randomness.randrange(8)
                damaged = bytearray(content)
                damaged[place] ^= 1 << bit
                subject.file.write_bytes(damaged)
                found.add(subject, truth, f"bit {bit} of byte {place}")
    return found


def edits(
    subject: Subject, count: int, seal: Callable[[dict[str, Any]], Any] | None = None, seed: int = 0
) -> Outcomes:
    """Change one place of a JSON file at a time, ``count`` times, and look at the results.

    Args:
        subject: the file.
        count: how many times.
        seal: makes the digest of the record right again, as a forger would.
        seed: of the choice.
    """
    randomness, found = random.Random(seed), Outcomes()
    truth = subject.observe()
    with restored(subject.file) as content:
        for _ in range(count):
            record = json.loads(content)
            damage = _edit(record, randomness)
            text = json.dumps(record if seal is None else seal(record), indent=1)
            if damage.startswith("a second"):  # a key that stands twice
                key = damage.split()[-1]
                text = text.replace("{", f'{{"{key}": {json.dumps(record[key])},', 1)
            subject.file.write_text(text, encoding="utf-8")
            found.add(subject, truth, damage)
    return found


def _edit(record: dict[str, Any], randomness: random.Random) -> str:
    """Change ``record`` in one place, and say what was done."""
    places = list(_places(record))
    container, key, name = randomness.choice(places)
    before = container[key]
    how = randomness.choice(("value", "value", "value", "near", "remove", "add", "twice"))
    if how == "twice":
        return f"a second {randomness.choice(list(record))}"
    if how == "near" and isinstance(before, bool | int | float) and not isinstance(before, bool):
        container[key] = before * 1.1 if isinstance(before, float) else before + randomness.choice((-1, 1))
    elif how == "near" and isinstance(before, list) and len(before) > 1:
        container[key] = before[::-1] if before[::-1] != before else before[:-1]
    elif how == "remove":
        del container[key]
        return f"{name} removed"
    elif how == "add":
        if isinstance(container, dict):
            container["unknown"] = randomness.choice(ODD)
            return f"a key next to {name}"
        container.insert(key, randomness.choice(ODD))
        return f"an entry before {name}"
    else:
        others = [value for value in ODD if value != before or type(value) is not type(before)]
        container[key] = randomness.choice(others)
    return f"{name} = {str(container[key])[:30]!r}"


def _places(value: Any, name: str = "") -> Iterator[tuple[Any, Any, str]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield value, key, f"{name}.{key}"
        if isinstance(entry, dict | list):
            yield from _places(entry, f"{name}.{key}")
