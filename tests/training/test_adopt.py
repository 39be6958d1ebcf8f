"""candid.adopt: from a folder of images to a model with verdicts."""

import runpy
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from sklearn.covariance import LedoitWolf
from torch import nn

import candid
from candid import CandidError
from candid._support.numbers import softmax
from candid.data.class_names import names
from candid.judging.held_out import HeldOut, needed
from candid.trust.ranking import ALL
from tests.helpers import RecordedProgress, candid_command
from tests.training.runs import run

CLASSES = ("blue", "green", "red")
SIDE = 6


def write(folder: Path, classes: tuple[str, ...] = CLASSES, count: int = 40, start: int = 0) -> Path:
    """Write ``count`` noisy images of each class, all in one colour."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(start, start + count):
            random = np.random.default_rng([number, i])
            pixels = random.normal(90, 35, (SIDE, SIDE, 3))
            pixels[..., 2 - number % 3] += 60
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{i:03}.png")
    return folder


def network() -> nn.Module:
    """A classifier of colours that is right most of the time."""
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 3))
    layer = net[2]
    assert isinstance(layer, nn.Linear)
    weight = torch.zeros(3, 3, 9)
    weight[[0, 1, 2], [2, 1, 0]] = 1.0
    with torch.no_grad():
        layer.weight.copy_(weight.flatten(1) + 0.05 * torch.randn(3, 27))
        layer.bias.zero_()
    return net


def eye(class_names: tuple[str, ...] = CLASSES) -> candid.ModuleSoftmax:
    return candid.ModuleSoftmax(network(), SIDE, class_names)


def test_labelled_images_are_halved(tmp_path: Path) -> None:
    model = candid.adopt(eye(), write(tmp_path / "photos"), workers=0)
    assert model.metadata["adopted"] == {"images": 60, "held_out": 60, "labels": True}
    assert len(model.held_out["training_keys"]) == 60
    held_out = needed(model)
    rule = held_out.rule()
    assert rule.score.name == "combined"
    assert rule.promises[ALL].error.in_force == 0.05
    assert (rule.promises[ALL].n_reference, len(held_out)) == (60, 60)
    assert not set(held_out.statistics["keys"].tolist()) & set(model.held_out["training_keys"].tolist())


def test_the_density_is_ledoit_and_wolfs(tmp_path: Path) -> None:
    adopted = eye()
    fit = write(tmp_path / "fit", count=30)
    model = candid.adopt(adopted, fit, held_out=str(write(tmp_path / "held", count=10, start=30)), workers=0)
    pixels = [np.asarray(Image.open(path)) / 255 for path in sorted(fit.rglob("*.png"))]
    images = np.stack(pixels).transpose(0, 3, 1, 2).astype(np.float32)
    features = adopted.statistics(images).astype(float)
    expected = LedoitWolf().fit(features)
    outputs = model.outputs(images)
    assert outputs.novelty is not None
    assert np.allclose(outputs.novelty[:, 0], expected.mahalanobis(features), rtol=5e-3)
    posterior = softmax(outputs.logits.astype(float)).mean(0)
    assert np.allclose(np.exp(model.log_priors), posterior, atol=1e-3)


def test_new_images_get_verdicts_at_their_levels(tmp_path: Path) -> None:
    held = write(tmp_path / "held", count=100, start=100)
    model = candid.adopt(eye(), write(tmp_path / "fit"), held_out=str(held), workers=0)
    new = candid.examine(model, write(tmp_path / "new", count=100, start=300), novelty=0.05)
    novel = sum(each.verdict == "novel" for each in new)
    assert novel <= 0.05 * 300 + 3.5 * (0.05 * 0.95 * 300 * 2) ** 0.5  # of two draws of 300
    assert candid.examine(model, np.ones((SIDE, SIDE, 3), np.float32))[0].verdict == "novel"


def test_without_labels_only_novelty_is_promised(tmp_path: Path) -> None:
    folder, progress = write(tmp_path / "photos", ("holidays", "garden")), RecordedProgress()
    model = candid.adopt(eye(), folder, workers=0, progress=progress)
    assert any("without labels no class set is promised" in message for message in progress.messages)
    assert model.metadata["adopted"]["labels"] is False
    rule = needed(model).rule()
    promises = rule.promises[ALL]
    assert promises.novelty.in_force == 0.05
    assert promises.to_dict()["error"]["in_force"] == 1
    assert any("nothing is promised about classes" in sentence for sentence in promises.sentences())
    examined = candid.examine(model, folder)
    assert {each.verdict for each in examined} <= {"accept", "ambiguous", "novel"}
    assert all(each.classes == (each.label,) for each in examined if each.verdict == "accept")
    unsure = candid.examine(model, folder, confidence=0)
    assert all(each.classes in ((each.label,), ()) for each in unsure)
    assert rule.to_dict()["smallest_ratio"] == 1
    for level in ({"error": 0.1}, {"risk": 0.1}):
        with pytest.raises(CandidError, match="have no labels"):
            candid.examine(model, folder, **level)


def test_images_that_the_density_was_fitted_to_are_not_held_out(tmp_path: Path) -> None:
    both = write(tmp_path / "fit", count=15)
    model = candid.adopt(eye(), both, held_out=str(both), workers=0, progress=(said := RecordedProgress()))
    assert model.metadata["adopted"]["held_out"] == 0 and HeldOut.of(model) is None
    assert any("are among the training images: they are left out" in message for message in said.messages)


def test_images_in_one_folder_have_no_labels(tmp_path: Path) -> None:
    for path in write(tmp_path / "classes").rglob("*.png"):
        path.rename(tmp_path / f"{path.parent.name}-{path.name}")
    assert candid.adopt(eye(), tmp_path, workers=0).metadata["adopted"]["labels"] is False


def test_folders_of_imagenet_are_classes(tmp_path: Path) -> None:
    numbers = tuple(names())[:3]
    model = candid.adopt(eye(tuple(names().values())[:3]), write(tmp_path / "photos", numbers), workers=0)
    assert model.metadata["adopted"]["labels"] is True
    assert candid.evaluate(model, str(tmp_path / "photos"), out=tmp_path / "results", workers=0)


def test_a_folder_that_is_no_class_among_others(tmp_path: Path) -> None:
    write(tmp_path / "photos", ("blue", "gren", "red"), count=4)
    with pytest.raises(CandidError, match="'gren', unknown to the model: .*green"):
        candid.adopt(eye(), tmp_path / "photos", workers=0)


def test_parts_of_the_data_are_kept_apart(tmp_path: Path) -> None:
    write(tmp_path / "train", count=12)
    write(tmp_path / "val", count=8, start=12)
    write(tmp_path / "test", count=5, start=20)
    model = candid.adopt(eye(), tmp_path, workers=0)
    assert model.metadata["adopted"] == {"images": 36, "held_out": 24, "labels": True}


def test_few_images_give_no_verdicts(tmp_path: Path) -> None:
    progress = RecordedProgress()
    folder = write(tmp_path / "photos", count=4)
    model = candid.adopt(eye(), folder, workers=0, progress=progress)
    assert HeldOut.of(model) is None
    assert "no p-values: 6 images were held out, at least 20 are needed" in progress.messages
    assert candid.examine(model, folder)[0].verdict is None


def test_images_that_are_all_alike(tmp_path: Path) -> None:
    for i in range(30):
        Image.new("RGB", (SIDE, SIDE), "grey").save(tmp_path / f"{i}.png")
    with pytest.raises(CandidError, match="look the same"):
        candid.adopt(eye(), tmp_path, workers=0)


def test_a_broken_image(tmp_path: Path) -> None:
    folder = write(tmp_path / "photos", count=20)
    (folder / "red" / "000.png").write_bytes(b"no image")
    with pytest.raises(CandidError, match=r"000\.png"):
        candid.adopt(eye(), folder, workers=0)
    counts = candid.adopt(eye(), folder, workers=0, skip_bad=True).metadata["adopted"]
    assert counts["images"] + counts["held_out"] == 59


def test_images_of_one_object_are_not_divided_and_count_once(tmp_path: Path) -> None:
    photos, progress = write(tmp_path / "photos"), RecordedProgress()
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    rows = [f"{name},{number // 3}" for number, name in enumerate(names)]
    (tmp_path / "table.csv").write_text("\n".join(["path,object", *rows]))
    table = f"{tmp_path / 'table.csv'}:object"
    model = candid.adopt(eye(), photos, progress=progress, together=table, workers=0)
    held_out = HeldOut.of(model)
    assert held_out is not None and len(held_out) == model.metadata["adopted"]["held_out"] == 60
    assert "60 held-out images in 20 series: each series counts once" in progress.messages
    assert len(np.unique(held_out.statistics["series"])) == 20
    with pytest.raises(CandidError, match="leaves 0 series of held-out images"):  # all are trained on
        candid.adopt(eye(), photos, held_out=str(photos / "red"), together=table, workers=0)


def test_the_command(tmp_path: Path) -> None:
    config = candid.ResNetConfig(3, SIDE, SIDE, classes=3, blocks=(1,), widths=(4,), stem="3x3")
    candid.save(candid.ResNet(config, CLASSES, seed=0).eval(), tmp_path / "resnet")
    photos = write(tmp_path / "photos")
    done = candid_command("adopt", tmp_path / "resnet", photos, "--out", tmp_path / "model", "--workers", 0)
    assert done.exit_code == 0, done
    assert "3 classes with the posteriors of" in done.stdout
    assert "60 held out" in done.stdout
    assert "Novelty 5 %" in done.stdout
    done = candid_command("examine", tmp_path / "model", photos / "red")
    assert done.exit_code == 0, done
    for command in (["explain"], ["plane", photos, "--classes", "blue,red"], ["refit", photos]):
        done = candid_command(command[0], tmp_path / "model", *command[1:], "--out", tmp_path / "figures")
        assert "can't come from an adopted model" in str(done.exception), command


def test_two_processes_store_the_scores_of_one(tmp_path: Path) -> None:
    config = candid.ResNetConfig(3, SIDE, SIDE, classes=3, blocks=(1,), widths=(4,), stem="3x3")
    candid.save(candid.ResNet(config, CLASSES, seed=0).eval(), tmp_path / "resnet")
    photos = write(tmp_path / "photos", count=170)  # more than a batch in each half
    one = candid.adopt(tmp_path / "resnet", photos, workers=0)
    command = [sys.executable, "-m", "candid", "adopt", "--workers=0", "--devices=2"]
    done = run(tmp_path / "resnet", photos, "--out", tmp_path / "model", command=command)
    assert done.returncode == 0, done.stderr
    found, expected = HeldOut.of(candid.load(tmp_path / "model")), HeldOut.of(one)
    assert found is not None and expected is not None
    assert np.array_equal(found.statistics["keys"], expected.statistics["keys"])
    np.testing.assert_allclose(
        found.statistics["novelty"], expected.statistics["novelty"], rtol=1.3e-6, atol=1e-5
    )


def test_class_names_from_a_file(tmp_path: Path) -> None:
    network_file, names_file = tmp_path / "net.pt2", tmp_path / "names.txt"
    batch = torch.export.Dim("batch", min=1, max=1024)
    shapes = ({0: batch},)
    program = torch.export.export(network().eval(), (torch.rand(2, 3, SIDE, SIDE),), dynamic_shapes=shapes)
    torch.export.save(program, network_file)
    names_file.write_text("blue\ngreen\nred\n")
    photos = write(tmp_path / "photos", count=20)
    model = candid.adopt(network_file, photos, class_names=names_file, workers=0)
    assert model.class_names == CLASSES
    assert model.metadata["adopted"]["labels"] is True
    names_file.write_text("blue\ngreen\n")
    with pytest.raises(CandidError, match="3 classes but 2 class names"):
        candid.adopt(network_file, photos, class_names=names_file, workers=0)


def test_a_network_of_python_is_deployed_by_one_call(tmp_path: Path) -> None:
    """Adopted and exported in memory: the ONNX file and its JSON give the verdicts, without the network."""
    data = write(tmp_path / "photos")
    model = candid.adopt(eye(), data, out=tmp_path / "adopted", workers=0)
    (made,) = candid.export(model, tmp_path / "model.onnx")
    assert made.verdicts == tmp_path / "model.json" and max(made.differences.values()) < 1e-4
    script = runpy.run_path("examples/deploy/verdict.py")
    session, verdicts = onnxruntime.InferenceSession(str(made.path)), script["Verdicts"](made.verdicts)
    files = sorted(data.rglob("*.png"))[::9]
    for file, expected in zip(files, candid.examine(model, files), strict=True):
        image = script["seen"](file, SIDE, verdicts.known["margin"])
        logits, novelty = session.run(["logits", "novelty"], {"images": image[None]})
        verdict, classes, kind, _, p = verdicts.verdict(logits[0], novelty[0])
        assert (verdict, classes, kind) == (expected.verdict, list(expected.classes or ()), expected.node)
        assert p == pytest.approx(expected.p_value, abs=1e-6)
    with pytest.raises(CandidError, match=r"give candid.ModuleSoftmax\(network, size=224"):
        candid.adopt(network(), data)
