"""Whole audits of small trained models: what they find, keep, write and refuse."""

import base64
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError
from PIL import Image

import candid
from candid._support.errors import CandidError, NonFiniteError
from candid.evaluation.compare import read_rows
from candid.reports.audit.content import record
from candid.reports.audit.grades import CRITERIA
from candid.reports.audit.options import AuditOptions
from candid.reports.audit.page import POLICY, page
from candid.reports.audit.pictures import Picture, Pictures, embedded, reduced
from candid.reports.audit.record import grades_of, missing
from candid.reports.audit.run import audit
from tests.data.helpers import write_shard
from tests.helpers import candid_command, small_classifier
from tests.training.runs import environment

OPTIONS = [
    *("--data", "digits", "--ood", "noise=uniform-noise", "--images", "60", "--attack-images", "3"),
    *("--corruptions", "contrast", "--severities", "3", "--steps", "4", "--examples", "3", "--workers", "0"),
]
CALL: dict[str, Any] = {
    "ood": {"noise": "uniform-noise"},
    "images": 60,
    "attack_images": 3,
    "examples": 3,
    "corruptions": ("contrast",),
    "severities": (3,),
    "steps": 4,
    "workers": 0,
}
LARGEST = 8_000_000


def models(runs: Path) -> list[Path]:
    return [runs / "own", runs / "resnet/model/best"]


def command(*arguments: object) -> Any:
    return candid_command("audit", *arguments)


def kept_files(out: Path) -> dict[Path, int]:
    return {
        file: file.stat().st_mtime_ns
        for kind in ("predictions", "attacks")
        for file in (out / kind).glob("*")
    }


@pytest.fixture(scope="module")
def killed(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, int]]:
    """The folder of an audit that was killed while it attacked, and the files it had finished."""
    out = tmp_path_factory.mktemp("audit") / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "candid", "audit", *map(str, models(runs)), *OPTIONS, "--out", str(out)],
        env=environment(),
        stderr=subprocess.PIPE,
    )
    while not list(out.glob("attacks/*.safetensors")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (out / "audit.json").exists()
    return out, {file: age for file, age in kept_files(out).items() if file.suffix == ".safetensors"}


@pytest.fixture(scope="module")
def made(runs: Path, killed: tuple[Path, dict[Path, int]]) -> tuple[Path, str]:
    """The folder of the same audit, resumed, and what the command printed."""
    out, _ = killed
    done = command(*models(runs), *OPTIONS, "--out", out, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    return out, done.stdout


@pytest.fixture(scope="module")
def found(made: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((made[0] / "audit.json").read_text())


def test_a_killed_audit_goes_on(killed: tuple[Path, dict[Path, int]], made: tuple[Path, str]) -> None:
    _, before = killed
    after = kept_files(made[0])
    assert before.items() <= after.items() and len(before) < len(after)


def test_the_same_findings_are_the_same_bytes(runs: Path, made: tuple[Path, str], tmp_path: Path) -> None:
    fresh = audit(models(runs), "digits", out=tmp_path / "other", **CALL)
    text = json.dumps(record(fresh, grades_of(fresh)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    assert (made[0] / "audit.json").read_text() == text
    assert json.loads(made[1]) == json.loads(text)
    assert str(tmp_path) not in text and str(made[0]) not in text


def test_figures_are_those_of_the_studies(made: tuple[Path, str], found: dict[str, Any]) -> None:
    out, _ = made
    own, resnet = found["models"]
    for model in (own, resnet):
        metrics = json.loads((out / "evaluation" / model["name"] / "metrics.json").read_text())
        assert model["evaluation"]["accuracy"] == pytest.approx(metrics["accuracy"], rel=1e-8)
        assert model["evaluation"]["images"] == 60 and model["held_out_images"] > 100
        assert [each["aspect"] for each in model["grades"]] == list(CRITERIA)
        assert model["grades"][-1]["grade"] != "good"
    assert [row["name"] for row in read_rows([out / "evaluation/own", out / "evaluation/resnet"])] == [
        "own",
        "resnet",
    ]
    (swept, _) = json.loads((out / "corruptions/corruptions.json").read_text())
    assert own["corruptions"]["errors"] == {"contrast": pytest.approx(swept["errors"]["contrast"])}
    assert own["corruptions"]["reference"] == "resnet"
    attacked = json.loads((out / "attack-tables/attacks.json").read_text())["metrics"]
    assert [each["d"] for each in own["attacks"]] == [0, 66, 1000] * 3
    assert [each["d"] for each in resnet["attacks"]] == [0] * 3
    assert own["attacks"][0]["l2_mean"] == pytest.approx(attacked[0]["l2_mean"])
    assert len(own["explanation"]["closest_pairs"]) == 10 and resnet["explanation"] is None
    assert list(own["explanation"]["receptive_fields"]) == ["own", "resnet"]
    assert "no likelihood" in resnet["missing"][0] and own["missing"] == []
    assert sorted(each["set"] for each in found["examples"]) == ["noise", "test", "test"]
    for example in found["examples"]:
        assert (out / example["image"]).is_file()
        assert example["opinions"][0]["model"] == "own" and 0 < example["opinions"][0]["confidence"] <= 1
        keys = {"label", "posterior", "p_value", "verdict", "classes", "summary"}
        assert keys <= example["opinions"][0].keys()


class Reader(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.depth: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.depth[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth[tag] -= 1

    def of(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


def test_the_page_needs_nothing_else_and_is_accessible(made: tuple[Path, str], found: dict[str, Any]) -> None:
    text = (made[0] / "audit.html").read_text()
    assert len(text.encode()) < LARGEST
    reader = Reader(text)
    assert "http:" not in text and "https:" not in text and "<script" not in text
    assert {"http-equiv": "Content-Security-Policy", "content": POLICY} in reader.of("meta")
    links = [link["href"] or "" for link in reader.of("a")]
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) and {link.removeprefix("#") for link in links} <= set(ids)
    pictures = reader.of("img")
    assert len(pictures) >= 10
    assert all(
        (each["src"] or "").startswith("data:image/") and len(each["alt"] or "") > 20 for each in pictures
    )
    assert all(each["role"] == "img" and each["aria-label"] for each in reader.of("svg"))
    assert all(each.get("scope") in ("col", "row") for each in reader.of("th"))
    assert len(reader.of("caption")) == len(reader.of("table"))
    named = [each["aria-labelledby"] for _, each in reader.tags if "aria-labelledby" in each]
    assert set(named) <= set(ids)
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(reader.of(landmark)) == 1
    assert len(reader.of("details")) == len(reader.of("summary")) == len(reader.of("section"))
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    void = {"meta", "img", "br"}
    assert {tag: open_ for tag, open_ in reader.depth.items() if open_ and tag not in void} == {}


def test_the_page_says_what_was_found(made: tuple[Path, str], found: dict[str, Any]) -> None:
    text = (made[0] / "audit.html").read_text()
    plain = unescape(re.sub(r"<[^>]+>", "", text)).replace("\N{NO-BREAK SPACE}", " ")
    for model in found["models"]:
        for finding in model["grades"]:
            assert finding["sentence"] in plain
    assert "at most 60 images of each set" in plain
    assert len(found["side_by_side"]) >= 3 and all(sentence in plain for sentence in found["side_by_side"])
    for words in ("evaluate", "corrupt", "attack", "explain", "examine", "compare"):
        assert f"<code>candid {words} " in text


def test_pictures_never_take_more_than_their_room(runs: Path, tmp_path: Path) -> None:
    left_out = {"ood": {}, "corruption_images": 0, "attack_images": 0, "examples": 0}
    pictures = Pictures(audit(runs / "own", "digits", out=tmp_path, **CALL | left_out))
    pictures.room = 150_000
    taken = [len(pictures.calibration().address) for _ in range(12)]
    assert sum(taken) + pictures.room == 150_000 and pictures.room > 0
    assert taken[-1] < taken[0] <= 150_000 / 4


def test_pictures_are_reduced_when_there_is_no_room(made: tuple[Path, str]) -> None:
    for file in (made[0] / "figures").glob("*.png"):
        whole, small = embedded(file), reduced(file)
        sizes = len(file.read_bytes()), len(file.with_suffix(".svg").read_bytes())
        kind = "png" if sizes[0] <= sizes[1] else "svg+xml"
        assert whole.startswith(f"data:image/{kind};base64,") and len(whole) <= 4 * min(sizes) / 3 + 40
        with (
            Image.open(file) as own,
            Image.open(io.BytesIO(base64.b64decode(small.partition(",")[2]))) as less,
        ):
            assert less.format == "JPEG" and less.width < own.width


def test_what_is_missing_is_said_not_fatal(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undrawn(self: Pictures, name: str, figure: Any, alt: str, caption: str, scale: float = 1) -> Picture:
        return Picture("data:", 1, 1, alt, caption)

    monkeypatch.setattr(Pictures, "_picture", undrawn)
    call = CALL | {"out": tmp_path, "ood": {}, "kappa": (0.01,), "examples": 1}
    found = audit([runs / "bare", runs / "own"], "digits", **call)
    bare, own = grades_of(found).values()
    assert [each.grade for each in bare][2:4] == ["unknown", "unknown"] and "held-out" in bare[2].sentence
    assert own[3].grade == "unknown" and "--ood" in own[3].sentence and own[2].grade != "unknown"
    assert "candid calibrate" in missing(found)["bare"][0] and "--ood" in missing(found)["own"][0]
    assert found.attacks is not None
    assert [[each.d for each in model.metrics] for model in found.attacks] == [[0], [0, 66, 1000]]
    text = page(found, grades_of(found))
    assert "No other images were given" in text and text.count("<code>candid attack") == 2

    alone = audit(runs / "resnet", "digits", **call | {"corruption_images": 0, "attack_images": 0})
    text = page(alone, grades_of(alone))
    for reason in ("--corruption-images 0", "--attack-images 0", "A ResNet has no latent space"):
        assert reason in re.sub(r"</?code>", "", text)
    assert [each.grade for each in grades_of(alone)["resnet"]][4:] == ["unknown", "unknown"]
    assert alone.examples == []


def test_shards_have_no_examples_and_a_wild_inverse_no_explanations(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wild(*_: object, **__: object) -> None:
        raise NonFiniteError("The latent is too large to be inverted.")

    monkeypatch.setattr("candid.reports.audit.run.explain", wild)
    write_shard(tmp_path / "packed.tar", range(5))
    call = CALL | {"out": tmp_path / "out", "images": None, "corruption_images": 0, "attack_images": 0}
    call |= {"ood": {"packed": str(tmp_path / "packed.tar")}, "examples": 3}
    found = audit(runs / "own", "digits", **call)
    assert found.examples and {each.source for each in found.examples} == {"test"}
    assert "packed" in found.evaluations[0].metrics["ood"]
    assert "be explained: The latent is too large" in page(found, grades_of(found))


def test_mistakes_are_said_before_anything_runs(runs: Path, tmp_path: Path) -> None:
    own, _ = models(runs)
    other = candid.save(small_classifier(), tmp_path / "other")
    out = tmp_path / "out"
    for arguments, message in (
        ((own, "--data", tmp_path / "none"), "no data set or folder"),
        ((tmp_path / "none", "--data", "digits"), "There is no model"),
        ((own, other, "--data", "digits"), "have different classes: audit them separately"),
        ((own, "--data", "digits", "--ood", "noise"), "--ood takes NAME=PATH"),
        ((own, "--data", "digits", "--ood", f"x={tmp_path / 'none'}"), "no data set or folder"),
        ((own, "--data", "digits", "--ood", "test=constant"), "is taken by the test images"),
        ((own, "--data", "digits", "--corruptions", "fogg"), "did you mean 'fog'"),
        ((own, "--data", "digits", "--severities", "high"), "--severities takes whole numbers"),
        ((own, "--data", "digits", "--images", "0"), "at least 1"),
        ((own, "--data", "digits", "--attack-images", "-1"), "'attack_images' must be at least 0"),
        ((own, "--data", "digits", "--steps", "0"), "'steps' must be at least 1"),
    ):
        done = command(*arguments, "--out", out, "--workers", "0")
        assert isinstance(done.exception, CandidError | CycloptsError), (arguments, done.output)
        assert message in str(done.exception)
        assert not out.exists()


def test_quick_samples() -> None:
    for given, images, attacks in (
        ({"quick": True}, 1000, 20),
        ({"quick": True, "images": 5, "attack_images": 2}, 5, 2),
        ({}, None, 200),
    ):
        options = AuditOptions(**given).sampled(through_eye=False)
        assert (options.images, options.attack_images) == (images, attacks)


def test_quick_samples_of_photo_models_are_smaller() -> None:
    options = AuditOptions(quick=True).sampled(through_eye=True)
    assert options.images == 1000 and options.corruption_images == 30
    assert options.attack_images == 2 and len(options.kappa) * len(options.d) == 2 and options.steps == 40
    chosen = AuditOptions(quick=True, attack_images=5, steps=100).sampled(through_eye=True)
    assert (chosen.attack_images, chosen.steps) == (5, 100)
    assert AuditOptions().sampled(through_eye=True).attack_images == 200
