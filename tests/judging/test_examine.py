"""Images in, judgements out: one after the other, bad ones named, pages drawn."""

import json
import math
import re
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import candid
from candid import GenerativeClassifier, ResNet, ResNetConfig
from candid._support.errors import CandidError
from candid.data.images import Preprocessing, to_float
from candid.data.splits import ArraySplit
from candid.explanations.class_maps import ClassMaps
from candid.explanations.counterfactual import Counterfactual
from candid.explanations.explainer import Explainer
from candid.inference.predictions import predict
from candid.inference.runner import Runner
from candid.judging.calibrate import measure
from candid.judging.examine import Examiner, image_paths
from candid.judging.held_out import needed
from candid.models.flow.coupling import ActNorm
from candid.trust.promises import ExamineOptions
from candid.trust.ranking import ALL
from candid.trust.scores import SCORES
from candid.trust.verdict import Examination, UnusableImage
from tests.explanations.mixtures import decided_classifier
from tests.helpers import candid_command, small_classifier


@pytest.fixture(scope="module")
def model() -> GenerativeClassifier:
    """Calibrated on random images."""
    model = decided_classifier()
    random = np.random.default_rng(0)
    images = random.integers(0, 256, size=(150, 3, 16, 16), dtype=np.uint8)
    labels = model.outputs(to_float(images)).logits.argmax(1)
    found = measure(Runner(model), None, ArraySplit(images, labels), Preprocessing(3, 16, 16))
    assert found is not None
    model.class_names = ("cat", "dog", "a fish, or a bird")
    found.attach(model)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Seven images of several sizes and modes in two folders, and two that are none."""
    random = np.random.default_rng(0)
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for i in range(5):
        pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{i}.png")
    Image.fromarray(random.integers(0, 256, (40, 30), dtype=np.uint8)).save(tmp_path / "photos/more/grey.png")
    Image.fromarray(np.full((20, 20, 3), 7, np.uint8)).save(tmp_path / "photos/more/plain.jpg")
    (tmp_path / "photos" / "3cut.png").write_bytes((tmp_path / "photos" / "3.png").read_bytes()[:200])
    (tmp_path / "photos" / "text.png").write_text("not an image")
    (tmp_path / "photos" / "notes.txt").write_text("no image either")
    return tmp_path / "photos"


def examined(model: Any, paths: list[Path], evidence: bool = True) -> list[Examination | UnusableImage]:
    return list(Examiner(model, evidence=evidence).examine(paths))


def test_sources_are_files_folders_and_patterns(folder: Path) -> None:
    names = [
        "0.png",
        "1.png",
        "2.png",
        "3.png",
        "3cut.png",
        "4.png",
        "more/grey.png",
        "more/plain.jpg",
        "text.png",
    ]
    everything = [folder / name for name in names]
    assert image_paths([str(folder)]) == everything
    assert image_paths([str(folder / "*.png")]) == [p for p in everything if p.parent == folder]
    assert image_paths([str(folder / "**" / "*.jpg")]) == [folder / "more" / "plain.jpg"]
    assert image_paths([str(folder / "m*")]) == everything[6:8]
    assert image_paths([str(folder / "4.png"), str(folder), str(folder / "[01].png")]) == [
        everything[5],
        *everything[:5],
        *everything[6:],
    ]
    odd = folder / "a[1].png"
    Image.new("RGB", (4, 4)).save(odd)
    assert image_paths([str(odd)]) == [odd]
    for source in ("none.png", "*.gif"):
        with pytest.raises(CandidError, match="no image, folder or match"):
            image_paths([str(folder / source)])
    empty = folder / "empty"
    empty.mkdir()
    with pytest.raises(CandidError, match="has no images"):
        image_paths([str(empty)])


def test_judgements_are_those_of_an_evaluation(model: GenerativeClassifier, folder: Path) -> None:
    paths = image_paths([str(folder)])
    found = examined(model, paths)
    assert [each.path for each in found] == [str(path) for path in paths]
    assert [Path(each.path).name for each in found if isinstance(each, UnusableImage)] == [
        "3cut.png",
        "text.png",
    ]
    good = [each for each in found if isinstance(each, Examination)]
    images = np.stack([each.evidence.image for each in good if each.evidence is not None])
    names = tuple(each.path for each in good)
    rule, measures = needed(model).rule(), Examiner(model).measures
    expected = predict(model.frozen(), images, np.full((len(good),), -1), names, measures)
    p_value = rule.p_values(expected.statistics)
    named = rule.named(expected.posterior)
    assert rule.by_class is not None
    predicted = expected.posterior.argmax(1)
    classes = np.where(np.isin(predicted, rule.by_class.groups), predicted, ALL)
    class_p_value = rule.by_class.p_values(rule.by_class.statistic(expected.statistics), classes)
    density = expected.log_density
    assert density is not None
    for i, each in enumerate(good):
        order = np.argsort(-expected.posterior[i])
        assert list(each.posterior) == [model.class_names[y] for y in order]
        assert list(each.posterior.values()) == pytest.approx(expected.posterior[i][order], rel=1e-5)
        assert sum(each.posterior.values()) == pytest.approx(1)
        kind = "accept" if named[i].sum() == 1 else "ambiguous"
        kind = "novel" if p_value[i] <= rule.promises[ALL].novelty.cut else kind
        assert each.p_value == pytest.approx(float(p_value[i])) and each.verdict == kind
        assert each.classes == (() if kind == "novel" else tuple(each.posterior)[: named[i].sum()])
        assert each.promises == rule.promises[ALL]
        assert each.class_p_value == pytest.approx(float(class_p_value[i]))
        assert each.log_density == pytest.approx(float(density[i]), rel=1e-6)
        assert each.evidence is not None and each.evidence.outputs.latent is not None
        assert each.evidence.outputs.latent.shape == (1, model.dimensions)


def test_images_stream(model: GenerativeClassifier, folder: Path) -> None:
    """Of endless images, the first ones are judged after a few batches."""
    endless = cycle([folder / "0.png", folder / "text.png"])
    found = list(islice(Examiner(model).examine(endless), 600))
    assert [type(each) for each in found] == [Examination, UnusableImage] * 300


def test_a_path_is_a_file_even_if_it_looks_like_a_pattern(model: GenerativeClassifier, folder: Path) -> None:
    gone = folder / "burst[2].png"  # it vanished after someone listed it
    found = list(Examiner(model).examine([gone, folder / "0.png"]))
    assert [type(each) for each in found] == [UnusableImage, Examination]


def test_images_that_overflow_the_network_are_named(folder: Path) -> None:
    model = small_classifier().requires_grad_(False)
    norm = next(layer for _, layer in model.flow.leaves() if isinstance(layer, ActNorm))
    norm.gamma.fill_(3e38)
    found = examined(model, [folder / "0.png", folder / "1.png"])
    assert all(isinstance(each, UnusableImage) and "overflow" in each.reason for each in found)


def test_without_held_out_images_there_is_no_p_value(folder: Path) -> None:
    model = small_classifier().requires_grad_(False)
    (found,) = examined(model, [folder / "0.png"])
    assert isinstance(found, Examination)
    assert found.p_value is None and found.verdict is None and found.confidence > 0
    with pytest.raises(CandidError, match="candid calibrate"):
        Examiner(model, "runs/mine", ExamineOptions(novelty=0.05))


def test_a_resnet_is_asked_but_explains_nothing(folder: Path) -> None:
    resnet = ResNet(ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")).eval()
    (found,) = examined(resnet, [folder / "0.png"])
    assert isinstance(found, Examination) and found.log_density is None
    with pytest.raises(CandidError, match="from a ResNet"):
        Explainer(resnet)


def test_an_explanation_adds_up(model: GenerativeClassifier, folder: Path) -> None:
    (found,) = examined(model, [folder / "0.png"])
    assert isinstance(found, Examination)
    order = [model.class_names.index(name) for name in found.posterior]
    shares = list(found.posterior.values())
    goal = order[-1]
    explanation = Explainer(model, top=2, towards=goal).explain(found)
    maps = explanation.maps
    assert isinstance(maps, ClassMaps) and explanation.space is not None
    assert maps.classes == tuple(order[:2])
    assert np.exp(maps.values.sum((1, 2))).tolist() == pytest.approx(shares[:2], abs=1e-4)
    assert explanation.space.classes == tuple(order)
    assert isinstance(explanation.changed, Counterfactual) and explanation.changed.y == goal
    already = Explainer(model, towards=goal, target=shares[-1] / 2).explain(found).changed
    assert isinstance(already, str) and "already has" in already
    assert Explainer(model).explain(found).changed is None


def test_a_novel_image_is_explained_by_the_most_unusual_part_of_its_score(
    model: GenerativeClassifier, folder: Path
) -> None:
    parts = SCORES["joint"].of_parts
    (novel,) = Examiner(model, evidence=True).examine(np.zeros((16, 16, 3)))
    assert isinstance(novel, Examination) and novel.verdict == "novel"
    explained = Explainer(model).explain(novel)
    assert {*explained.parts} == {*parts} and [*explained.parts.values()] == sorted(explained.parts.values())
    for name, p_value in explained.parts.items():
        (alone,) = Examiner(model, options=ExamineOptions(score=name)).examine(np.zeros((16, 16, 3)))
        assert isinstance(alone, Examination) and alone.p_value == p_value
    first, p_value = next(iter(explained.parts.items()))
    assert re.search(rf"unusual first: the [\w ]+ \(p = {p_value:.2g}\), ", explained.deciding)
    alone_novel = Examiner(model, options=ExamineOptions(score=first), evidence=True)
    (found,) = alone_novel.examine(np.zeros((16, 16, 3)))
    assert isinstance(found, Examination) and Explainer(model).explain(found).parts == {}
    (usual,) = examined(model, [folder / "0.png"])
    assert isinstance(usual, Examination) and usual.verdict != "novel"
    assert Explainer(model).explain(usual).deciding == ""


def run(*arguments: object) -> Any:
    return candid_command("examine", *arguments)


def test_the_command_prints_a_line_an_image_and_names_bad_ones(
    model: GenerativeClassifier, folder: Path, tmp_path: Path
) -> None:
    saved = candid.save(model, tmp_path / "model")
    done = run(saved, folder)
    assert done.exit_code == 2
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["class", "posterior", "p-value", "verdict", "image"]
    assert len(lines) == 1 + 7 and all(str(folder) in line for line in lines[1:])
    assert "3cut.png' can't be used" in done.stderr.replace("\n", "")
    assert "2 unusable" in done.stderr
    assert run(saved, folder / "0.png").exit_code == 0


def test_json_lines_and_pages(model: GenerativeClassifier, folder: Path, tmp_path: Path) -> None:
    saved = candid.save(model, tmp_path / "model")
    pages = tmp_path / "pages"
    (folder / "more" / "0.png").write_bytes((folder / "1.png").read_bytes())
    sources = (folder / "0.png", folder / "text.png", folder / "more" / "0.png")
    options = ("--towards", "dog", "--target", 0.6, "--heatmap-rule", "paper")
    done = run(saved, *sources, "--json", "--figures", pages, *options)
    assert done.exit_code == 2
    first, bad, second = map(json.loads, done.stdout.splitlines())
    assert bad == {"path": str(folder / "text.png"), "error": bad["error"]} and bad["error"]
    for record, page in ((first, "0.page.png"), (second, "0-2.page.png")):
        assert record["page"] == str(pages / page)
        assert record["label"] == next(iter(record["posterior"])) in model.class_names
        assert math.fsum(record["posterior"].values()) == pytest.approx(1)
        assert record["confidence"] == record["posterior"][record["label"]]
        assert 0 < record["p_value"] <= 1 and record["verdict"] in ("accept", "ambiguous", "novel")
        assert set(record["classes"]) <= set(model.class_names)
        assert record["summary"].endswith(".")
        with Image.open(pages / page) as shown:
            assert shown.width > 1000
        assert record["counterfactual"]["posterior"] == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing.png",), "no image, folder or match"),
        (("0.png", "--towards", "dog"), "--figures"),
        (("0.png", "--figures", "pages", "--towards", "*"), "takes one class"),
        (("0.png", "--figures", "pages", "--towards", "dgo"), "did you mean 'dog'"),
        (("0.png", "--figures", "pages", "--contrast", "-1"), "at least 0"),
        (("0.png", "--figures", "pages", "--top", "0"), "at least 1"),
        (("0.png", "--figures", "pages", "--target", "1.5"), "below 1"),
        (("0.png", "--novelty", "0.001"), "no image can be called novel"),
    ],
)
def test_mistakes_are_said(
    model: GenerativeClassifier,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    saved = candid.save(model, tmp_path / "model")
    monkeypatch.chdir(folder)
    done = run(saved, *arguments)
    assert isinstance(done.exception, CandidError) and message in str(done.exception)


def test_pages_never_replace_images_or_each_other(
    model: GenerativeClassifier, folder: Path, tmp_path: Path
) -> None:
    saved = candid.save(model, tmp_path / "model")
    (folder / "3cut.png").unlink()
    (folder / "text.png").unlink()
    for name in ("0-2.png", "more/0.png"):
        (folder / name).write_bytes((folder / "1.png").read_bytes())
    before = {path: path.read_bytes() for path in image_paths([str(folder)])}
    for _ in range(2):  # the pages of the first run are no images of the second
        done = run(saved, folder, "--figures", folder, "--json")
        assert done.exit_code == 0
        records = [json.loads(line) for line in done.stdout.splitlines()]
        assert [record["path"] for record in records] == [str(path) for path in before]
        assert len({record["page"] for record in records}) == len(before)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_an_image_without_a_counterfactual_does_not_end_the_run(folder: Path, tmp_path: Path) -> None:
    """A class in the middle of the others can't have every posterior."""
    model = small_classifier().requires_grad_(False)
    for part in (model.mixture.mean, model.mixture.prototypes):
        part.zero_()
    model.mixture.mean[:, 0] = torch.tensor([-0.1, 0.0, 0.1])
    saved = candid.save(model, tmp_path / "model")
    sources = folder / "0.png", folder / "1.png"
    done = run(saved, *sources, "--figures", tmp_path / "pages", "--towards", "1", "--target", 0.9, "--json")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == 2
    assert all("lower the target" in record["counterfactual"]["error"] for record in records)


def test_a_resnet_that_overflows_is_named(folder: Path) -> None:
    resnet = ResNet(ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")).eval()
    with torch.no_grad():
        resnet.fc.weight.fill_(3e38)
    (found,) = examined(resnet, [folder / "0.png"])
    assert isinstance(found, UnusableImage) and "overflow" in found.reason


def test_an_image_that_overflows_leaves_the_others_of_its_batch_alone(folder: Path) -> None:
    """Of a calibrated ResNet, too."""
    resnet = ResNet(ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")).eval()
    images = np.random.default_rng(0).integers(0, 256, size=(60, 3, 16, 16), dtype=np.uint8)
    found = measure(Runner(resnet), None, ArraySplit(images, np.arange(60) % 3), Preprocessing(3, 16, 16))
    assert found is not None
    found.attach(resnet)
    resnet.fc.register_forward_hook(
        lambda module, features, logits: (
            logits.index_fill(0, torch.tensor([1]), math.nan) if len(logits) == 3 else logits
        )
    )
    judged = examined(resnet, [folder / f"{i}.png" for i in range(3)])
    assert [type(each) for each in judged] == [Examination, UnusableImage, Examination]
    assert [Path(each.path).name for each in judged] == ["0.png", "1.png", "2.png"]
