"""Hostile model folders and names: links, bombs in JSON and safetensors, names in pages; other languages."""

import json
import locale
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from candid.models.checkpoint import sealed
from experiments.red.attack import attack, check, tried
from experiments.red.kills import SMALL, meaning, network, photos, run, start, warm

NAME = "\x1b]0;owned\x07<script>alert(1)</script>=1+1"
"""A class whose name is a command of a terminal, a script and a formula."""
SECONDS, MEGABYTES = 20.0, 1000.0


def _record(folder: Path) -> Path:
    return folder / "model.json"


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return damage that changes the record and makes its digest right again."""

    def damage(folder: Path) -> None:
        record = json.loads(_record(folder).read_text())
        change(record)
        _record(folder).write_text(json.dumps(sealed(record)))

    return damage


def _text(text: str) -> Callable[[Path], object]:
    return lambda folder: _record(folder).write_text(text)


def _weights(folder: Path) -> Path:
    return next(folder.glob("weights-*.safetensors"))


def _header(header: bytes, size: int | None = None) -> Callable[[Path], object]:
    """Return damage that gives the weights this header, of a length that may be a lie."""
    length = struct.pack("<Q", len(header) if size is None else size)
    return lambda folder: _weights(folder).write_bytes(length + header + bytes(64))


def _linked(folder: Path) -> None:
    """Let the weights be a link to a file outside."""
    weights = _weights(folder)
    outside = folder.parent / "outside.safetensors"
    shutil.move(weights, outside)
    outside.write_bytes(outside.read_bytes()[::-1])
    weights.symlink_to(outside)


def _endless(folder: Path) -> None:
    weights = _weights(folder)
    weights.unlink()
    weights.symlink_to("/dev/zero")


def _outside(record: dict[str, Any]) -> None:
    record["weights"]["file"] = "../../../../etc/passwd"


def _tensor(shape: list[int], end: int) -> bytes:
    return json.dumps({"mixture.mean": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()


BOMBS: dict[str, Callable[[Path], object]] = {
    "deep lists": _text("[" * 200_000 + "]" * 200_000),
    "deep objects": _text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "deep inside": _edited(lambda r: r.__setitem__("metadata", json.loads("[" * 900 + "]" * 900))),
    "a huge integer": _text('{"format": "candid-model", "format_version": ' + "9" * 100_000 + "}"),
    "a huge size": _edited(lambda r: r["config"]["flow"].__setitem__("widths", [10**12])),
    "many classes": _edited(lambda r: r["config"].__setitem__("classes", 10**15)),
    "many numbers": _text('{"format": [' + "0," * 3_000_000 + "0]}"),
    "NaN": _edited(lambda r: r["config"].__setitem__("mean", [float("nan")])),
    "an infinite height": _edited(lambda r: r["config"]["flow"].__setitem__("height", 1e308)),
    "no text": lambda folder: _record(folder).write_bytes(b"\xff\xfe\x00{}"),
    "a name outside": _edited(_outside),
    "a link to another file": _linked,
    "a link to /dev/zero": _endless,
    "a header of 2^63 bytes": _header(b"{}", 2**63),
    "a header of 1 GB": _header(b"{}", 2**30),
    "a deep header": _header(b"[" * 100_000),
    "a tensor of 2^60 numbers": _header(_tensor([2**30, 2**30], 2**62)),
    "a tensor of negative size": _header(_tensor([-1], 4)),
    "an empty header": _header(b""),
}


@attack(
    "Bombs and links in a model folder: one sentence, within 20 s of CPU and 1 GB, and nothing outside read.",
    600,
)
def bombs() -> str:
    warm()
    dearest, most = ("", 0.0), 0.0
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "work").mkdir()
        code, said = run(f"train digits --out run {SMALL}", place / "work")
        check(code == 0, said)
        photos(place / "photos", "rings", 1)
        for what, damage in BOMBS.items():
            folder = place / "bomb" / "model"
            shutil.rmtree(folder.parent, ignore_errors=True)
            shutil.copytree(place / "work" / "run" / "model" / "best", folder)
            damage(folder)
            seconds, megabytes = refused(what, folder, place / "photos")
            dearest, most = max(dearest, (what, seconds), key=lambda each: each[1]), max(most, megabytes)
    tried(inputs=len(BOMBS))
    return (
        f"{len(BOMBS)} folders, each one sentence; dearest: {dearest[0]}, {dearest[1]:.1f} s; {most:.0f} MB"
    )


def refused(what: str, folder: Path, images: Path) -> tuple[float, float]:
    """Run ``candid examine`` and check that it says one sentence; return its CPU seconds and its peak MB."""
    child = start(["examine", str(folder), str(images)], images)
    until, found = time.monotonic() + 5 * SECONDS, 0
    while not found and time.monotonic() < until:
        time.sleep(0.02)
        found, _, usage = os.wait4(child, os.WNOHANG)
    if not found:
        os.killpg(child, signal.SIGKILL)
        check(False, f"{what}: no end within {5 * SECONDS:g} s")
    said = (images.parent / "said").read_bytes().decode(errors="replace")
    seconds, megabytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3
    sentences = [line for line in said.splitlines() if line.startswith("candid: ")]
    check("Traceback" not in said and len(sentences) == 1, f"{what}: {said[-600:]}")
    check(len(said) < 1500, f"{what}: {len(said)} characters")
    check("root:" not in said, f"{what}: it read what is outside")
    check(seconds <= SECONDS and megabytes <= MEGABYTES, f"{what}: {seconds:.1f} s, {megabytes:.0f} MB")
    return seconds, megabytes


@attack(
    "A class with a hostile name: no command for a terminal, no script and no formula in any output.", 900
)
def hostile_names() -> str:
    warm()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name, "work")
        for label, kind in ((NAME.replace("/", "\u2215"), "rings"), ("plain", "stripes")):
            photos(place / "photos" / label, kind, 24)
        photos(place / "strange", "dots", 6)
        network(place / "eye.onnx", 24)
        heard = ""
        for words in (
            "train photos --out run --eye eye.onnx",
            "examine run photos --out verdicts.csv --figures pages",
            "evaluate run photos --out evaluation",
            "audit run --data photos --out audit --quick",
            "group run strange --out groups",
            "export run --out model.onnx",
            "info run",
            "teach run =2+3=strange --out taught",
        ):
            code, said = run(words, place, most=10**7)
            check(code in (0, 2) and "Traceback" not in said, f"{words}: {said[-500:]!r}")
            heard += said
        check("\x1b]0" not in heard and "\x07" not in heard, "a command for the terminal is written to it")
        kinds = {kind: _clean(place, kind) for kind in ("html", "csv", "svg", "md")}
        texts = _onnx_texts(place / "model.onnx")
        check(not any("\x1b" in text for text in texts), "a control character is in the ONNX file")
    tried(inputs=8)
    return f"8 commands, {kinds['html']} pages, {kinds['csv']} tables, {kinds['svg']} figures, one ONNX file"


def _clean(place: Path, kind: str) -> int:
    """Raise if a file of this kind has what runs; return how many there are."""
    files = [path for path in place.rglob(f"*.{kind}") if "cache" not in path.parts]
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        where = path.relative_to(place)
        check("\x1b" not in text and "\x07" not in text, f"{where} has control characters")
        check(kind == "md" or "<script>alert" not in text or kind == "csv", f"{where} has a script")
        if kind == "csv":
            starts = [cell[:1] for line in text.splitlines()[1:] for cell in line.split(",")]
            check("=" not in starts, f"{where} has a formula")
    return len(files)


def _onnx_texts(file: Path) -> list[str]:
    import onnx

    return [entry.value for entry in onnx.load(file).metadata_props]


@attack("With a language that writes decimal commas and in C, commands say and write the same bytes.", 600)
def decimal_commas() -> str:
    warm()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        locales = place / "locales"
        locales.mkdir()
        make = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(locales / "de_DE.UTF-8")]
        try:
            made = subprocess.run(make, capture_output=True).returncode <= 1
        except OSError:
            made = False
        if not made or not any(locales.iterdir()):
            return "skipped: localedef can't make a locale with decimal commas here"
        for kind in ("rings", "stripes"):
            photos(place / "photos" / kind, kind, 24)
        found = [_in_language(place, locales, each) for each in ("C", "de_DE.UTF-8")]
    tried(inputs=len(found) * 4)
    different = [name for name in found[0] if found[0][name] != found[1].get(name)]
    check(not different and found[0].keys() == found[1].keys(), f"{different} differ")
    return f"{len(found[0])} files and outputs of 5 commands are equal, byte for byte"


def _in_language(place: Path, locales: Path, language: str) -> dict[str, bytes]:
    """Run commands in a language, with ``setlocale`` as programs around Candid may have called it."""
    work = place / "here" / "work"  # models remember where their eye is: each time the same place
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copytree(place / "photos", work / "photos")
    network(work / "eye.onnx", 24)

    def speak() -> None:
        os.environ["LOCPATH"] = str(locales)
        locale.setlocale(locale.LC_ALL, language)
        assert language == "C" or locale.localeconv()["decimal_point"] == ","

    found: dict[str, bytes] = {}
    for words in (
        "train photos --out run --eye eye.onnx",
        "examine run photos --out verdicts.csv",
        "evaluate run photos --out evaluation",
        f"train digits --out digits {SMALL}",
        "export run --out model.onnx",
    ):
        code, said = run(words, work, speak, most=10**7)
        check(code == 0, f"{language}, {words}: {said[-500:]!r}")
        if words.startswith("examine"):
            found[words] = said.encode()
    for path in sorted(work.rglob("*")):
        if path.suffix in (".csv", ".json", ".safetensors", ".toml") and "cache" not in path.parts:
            found[str(path.relative_to(work))] = _lasting(path)
    return found


def _lasting(path: Path) -> bytes:
    """Return what a file says, without how long the work took."""
    if path.name == "metrics.csv":
        rows = [line.split(",") for line in path.read_text().splitlines()]
        timed = [place for place, name in enumerate(rows[0]) if "seconds" in name or "per_second" in name]
        return json.dumps([[c for i, c in enumerate(row) if i not in timed] for row in rows]).encode()
    return meaning(path)
