"""The study on ImageNet, with a small checkpoint of the released layout and photos that are made here."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import candid
from candid import CandidError
from candid._support.text import short_name
from candid.models.resnet import ResNet, ResNetConfig
from candid.robustness.corruptions.benchmark import CORRUPTIONS
from experiments.imagenet import paper, stages, study
from experiments.imagenet.__main__ import main
from experiments.imagenet.figures import chosen_photos
from experiments.imagenet.photos import class_names, divided, find_photos
from experiments.imagenet.tables import tables
from tests.helpers import candid_command
from tests.models.importers.test_released import released_state

CLASSES, PHOTOS = 5, 10


def make_photos(folder: Path, each: int) -> None:
    """Class folders of random textures with a size and a scale of their own."""
    random = np.random.default_rng(each)
    for label in range(CLASSES):
        own = folder / f"n{label:08d}"
        own.mkdir(parents=True)
        for number in range(each):
            coarse = Image.fromarray(random.integers(0, 256, (2 + label, 3, 3), dtype=np.uint8))
            coarse.resize((40 + 8 * label, 36), Image.Resampling.BICUBIC).save(own / f"{number}.JPEG")


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imagenet")
    make_photos(folder / "val", PHOTOS)
    make_photos(folder / "train", 2)
    rows = [f"{i},n{i:08d},{name}" for i, name in enumerate(("crane", "tiger_cat", "crane", "ship", "n/a"))]
    (folder / "classes.csv").write_text("\n".join(["index,wnid,name", *rows]))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A released file, and the folder of a ResNet."""
    folder = tmp_path_factory.mktemp("checkpoints")
    content = released_state(torch.Generator().manual_seed(0))
    content |= {"mu": 0.3 * content["mu"], "mu_t": 0.1 * content["mu_t"]}  # means as close as trained ones
    torch.save(content, folder / "beta_1.avg.pt")
    config = ResNetConfig(height=16, width=16, classes=CLASSES, blocks=(1,), widths=(4,), stem="3x3")
    candid.save(ResNet(config).eval(), folder / "resnet")
    return [str(folder / "beta_1.avg.pt"), str(folder / "resnet")]


def in_this_process(called: list[str], *arguments: object, launch: str | None = None) -> None:
    """Run a command, corruptions at one severity, and note its name."""
    called.append(str(arguments[0]))
    done = candid_command(*arguments, *(("--severities", "3") if arguments[0] == "corrupt" else ()))
    if done.exception is not None:
        raise done.exception


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, imagenet: Path, checkpoints: list[str]
) -> tuple[list[str], Path]:
    """The arguments of a study that stopped once and was finished, and its folder."""
    out = tmp_path_factory.mktemp("study")
    arguments = [*checkpoints, str(imagenet), "--out", str(out), "--workers", "0"]
    arguments += ["--held-out-share", "0.5", "--corrupted", "2"]
    called: list[str] = []

    def stopped(*given: object, launch: str | None = None) -> None:
        if given[0] == "explain":
            raise CandidError("the disk is full")
        in_this_process(called, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "candid", stopped)
        with pytest.raises(SystemExit):
            main(arguments)
        assert called == ["calibrate", "evaluate", "calibrate", "evaluate"]
        called.clear()
        patch.setattr(study, "candid", lambda *given, launch=None: in_this_process(called, *given))
        main(arguments)
        assert called == ["explain", "corrupt"]
    return arguments, out


@pytest.mark.slow
def test_every_place_on_the_page_is_filled(finished: tuple[list[str], Path]) -> None:
    _, out = finished
    page = (out / "README.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"<!-- ([\w-]+) -->(.*?)<!-- /\1 -->", page, re.DOTALL))
    assert len(found) >= 15 and all(text.strip() for text in found.values())
    rows = {}
    for name in ("table-2", "calibration", "similar-classes", "corruptions", "areas", "receptive-fields"):
        head, _, *lines = found[name].strip().splitlines()
        assert all(line.count("|") == head.count("|") for line in lines), name
        rows[name] = [line.split(" | ")[0].strip("| *") for line in lines]
    assert (
        rows["table-2"] == rows["calibration"] == rows["corruptions"] == ["β = 1", "paper", "ResNet", "paper"]
    )
    assert rows["areas"] == ["β = 1", "paper"] and rows["receptive-fields"] == ["β = 1", "ResNet"]
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    assert {"figure-3.png", "figure-4.png", "figure-5.png", "figure-6-4.png", "similarity.png"} <= {*figures}
    for figure in figures:
        with Image.open(out / figure) as image:
            assert min(image.size) > 100, figure


@pytest.mark.slow
def test_held_out_photos_are_not_evaluated(finished: tuple[list[str], Path]) -> None:
    _, out = finished
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    half = CLASSES * PHOTOS // 2
    assert results["photos"]["evaluated"] == results["photos"]["held_out"] == half
    for model in results["models"].values():
        assert model["images"] == model["held_out_images"] == half
    lines = (out / "work/evaluation/beta_1/images.csv").read_text(encoding="utf-8")
    evaluated = {str(Path(path).resolve()) for path in re.findall(r"[^,\n]+\.JPEG", lines)}
    held_out = {str(path.resolve()) for path in (out / "photos/val").rglob("*.JPEG")}
    assert len(evaluated) == len(held_out) == half and not evaluated & held_out
    assert f"{half} validation photos of {CLASSES} classes" in (out / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_second_run_computes_nothing(
    finished: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, out = finished
    before = (out / "results.json").read_bytes()

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError(f"computed again: {arguments}")

    for name in ("candid", "import_any", "draw_decisions"):
        monkeypatch.setattr(study, name, fail)
    main(arguments)
    assert (out / "results.json").read_bytes() == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("[11/11]") and all("finished before" in line for line in lines[:-1])


@pytest.mark.slow
def test_losses_as_printed_follow_from_the_true_ones(finished: tuple[list[str], Path]) -> None:
    _, out = finished
    model = json.loads((out / "results.json").read_text(encoding="utf-8"))["models"]["beta_1"]
    offset = np.log2(255 * np.array((0.229, 0.224, 0.225))).mean() + math.log2(2 * math.pi) / 2
    assert model["bits_per_dim"] == pytest.approx(model["L_X"] / math.log(2) + offset)
    error = math.log(0.5) - math.log(2 / 3 / math.sqrt(2))  # 2 x 2 maps: 2/3, twice 2/3/√2, and 1/3
    assert model["L_X"] - model["L_X_printed"] == pytest.approx(error)
    assert model["bits_printed"] == pytest.approx(model["L_X_printed"] / math.log(2) + 7.08)


def test_the_paper_s_numbers_agree_with_each_other() -> None:
    for beta, areas in paper.AREAS.items():
        mean = paper.CORRUPTIONS[beta][-1]
        assert len(areas) == len(CORRUPTIONS) and mean == pytest.approx(sum(areas) / 15, abs=0.06)
    for beta, (l_x, _, bits, accuracy, oce) in paper.TABLE_2.items():
        if l_x is not None:
            assert bits == pytest.approx(l_x / math.log(2) + paper.BITS_OFFSET, abs=0.011), beta
        if accuracy is not None:
            assert paper.CORRUPTIONS[beta][0] == pytest.approx(100 - accuracy, abs=0.01), beta
            assert paper.CALIBRATION[beta][-1] == oce, beta


def test_sentences_say_where_a_trend_breaks_and_how_far_the_paper_is(
    finished: tuple[list[str], Path],
) -> None:
    _, out = finished
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    results["photos"]["classes"] = 1000
    first = results["models"]["beta_1"]
    first["intervals"]["oce"] = [0, 1]
    accuracies = {"0": 0.001, "1": 0.6730, "2": 0.7273, "4": 0.72, "∞": 0.76}
    for name, accuracy in accuracies.items():
        ten = first["ten_crop"] | {"accuracy": accuracy}
        more = {"name": name, "beta": name, "oce": accuracy, "ten_crop": ten, "bits_printed": 4.0}
        results["models"][name] = first | more
        results["corruptions"][name] = results["corruptions"]["beta_1"] | {
            "mean_auc": {"two-tailed": -accuracy}
        }
    results["explanation"]["receptive_fields"] = {}
    for name in ("beta_1", "resnet"):
        del results["models"][name], results["corruptions"][name]
    found = tables(results | {"shown": "1"}, True)
    assert "Accuracy does not rise from beta 2 to 4. " in found["here-table-2"]
    assert "1.69 points of accuracy and 43.01 bits/dim, as printed" in found["here-table-2"]
    assert found["here-calibration"] == "*Here*: OCE does not rise from beta 2 to 4."
    assert found["here-corruptions"].endswith("The mean AUC does not fall from beta 2 to 4.")
    assert "| **β = 0** |" in found["table-2"] and "β = 0" not in found["calibration"]


@given(
    st.dictionaries(st.sampled_from([f"n{i}" for i in range(20)]), st.integers(2, 60), min_size=1),
    st.floats(0.01, 0.99),
)
def test_a_share_of_each_class_is_held_out_whatever_else_there_is(
    counts: dict[str, int], share: float
) -> None:
    found = {name: [Path("val", name, f"{i}.JPEG") for i in range(n)] for name, n in counts.items()}
    apart, rest = divided(found, share)
    for name, files in found.items():
        assert sorted(apart[name] + rest[name]) == sorted(files)
        assert len(apart[name]) == min(max(1, round(share * len(files))), len(files) - 1)
        moved = {name: [Path("elsewhere", name, file.name) for file in files]}
        assert [file.name for file in divided(moved, share)[0][name]] == [file.name for file in apart[name]]


def test_photos_of_a_trial_are_spread_and_other_photos_can_be_held_out(
    tmp_path: Path, imagenet: Path
) -> None:
    make_photos(tmp_path, 4)
    found = find_photos(imagenet, images=7, held_out=tmp_path)
    assert sum(map(len, found.test.values())) == 7 and len(found.test) == CLASSES
    assert sum(map(len, found.held_out.values())) == 20
    assert found.own_held_out and found.train is None
    assert find_photos(imagenet, share=0.5).train == imagenet / "train"
    assert find_photos(imagenet, share=0.5).key != find_photos(imagenet, share=0.6).key


def test_class_names_are_those_of_the_table_and_differ(imagenet: Path) -> None:
    wnids = [f"n{i:08d}" for i in range(CLASSES)]
    names = class_names(wnids, imagenet / "classes.csv")
    assert list(names) == wnids
    assert list(names.values()) == ["crane n00000000", "tiger cat", "crane n00000002", "ship", "n a"]
    assert list(class_names(wnids, None).values()) == wnids


def test_checkpoints_have_names_that_the_commands_keep(tmp_path: Path) -> None:
    files = [
        tmp_path / name for name in ("beta_1.avg.pt", "beta_0.5.pt", "resnet50-0676ba61.pth", "model.pt")
    ]
    folders = [tmp_path / "runs" / "long" / "model" / "best", tmp_path / "imported"]
    for path in files:
        path.touch()
    for path in folders:
        path.mkdir(parents=True)
    names = list(study.named_sources([*files, *folders]))
    assert names == ["beta_1", "beta_0.5", "resnet50-0676ba61", "checkpoint-model", "long", "imported"]
    assert [short_name(tmp_path / "models" / name) for name in names] == names


def test_figure_4_shows_the_four_cases() -> None:
    def row(path: str, p_value: float, **posterior: float) -> dict[str, str]:
        label, confidence = next(iter(posterior.items()))
        shares = json.dumps(posterior)
        base = {"path": path, "label": label, "true_label": label, "posterior": shares}
        return base | {"confidence": str(confidence), "p_value": str(p_value)}

    rows = [
        row("typical", 0.5, cat=0.7, dog=0.3),
        row("confident", 0.5, cat=0.99, dog=0.01),
        row("ambiguous", 0.9, cat=0.5, dog=0.48),
        row("interpretations", 0.3, cat=0.5, ship=0.49),
        row("novel", 0.001, cat=0.5, dog=0.5),
    ]

    def similar(a: str, b: str) -> bool:
        return "ship" not in (a, b)

    chosen = [each["path"] for each in chosen_photos(rows, similar)]
    assert chosen == ["confident", "ambiguous", "interpretations", "novel"]
    assert len(chosen_photos(rows[:1], similar)) == 4


def test_a_stage_runs_again_if_its_key_changes_or_a_file_is_gone(tmp_path: Path) -> None:
    runs: list[object] = []

    def make() -> dict[str, Any]:
        runs.append(None)
        (tmp_path / "figure.png").touch()
        return {"files": ["figure.png"], "value": len(runs)}

    def run(key: object) -> int:
        return stages.Stages(tmp_path, 1).run("name", "title", key, make)["value"]

    assert [run(1), run(1), run(2)] == [1, 1, 2]
    (tmp_path / "figure.png").unlink()
    assert [run(2), run(2)] == [3, 3]
    (tmp_path / "stages" / "name.json").write_text("{")
    assert run(2) == 4


def test_a_command_that_fails_stops_the_study(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CandidError, match="'candid nothing' stopped"):
        stages.candid("nothing")
    assert "There is no command 'nothing'" in capfd.readouterr().err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line in which the study ends."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("imagenet: ")


def test_mistakes_are_named_in_one_sentence(
    tmp_path: Path, imagenet: Path, checkpoints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    released, resnet = checkpoints
    photos, out = str(imagenet), ["--out", str(tmp_path / "out")]
    (tmp_path / "foreign.pt").write_bytes(b"text")
    (tmp_path / "flat" / "val").mkdir(parents=True)
    (tmp_path / "training" / "train").mkdir(parents=True)
    make_photos(tmp_path / "few", 2)
    (tmp_path / "few" / "n00000004").rename(tmp_path / "four")
    (tmp_path / "classes.csv").write_text("index,wnid,name\n0,n1,tench\n")
    (tmp_path / "beta_1.pt").write_bytes(Path(released).read_bytes())
    for arguments, message in (
        (["nothing.pt", photos], "There is no checkpoint 'nothing.pt'"),
        ([str(tmp_path / "foreign.pt"), photos], "is not a released ImageNet checkpoint"),
        ([str(tmp_path), photos], "has no model.json"),
        ([released, str(tmp_path / "beta_1.pt"), photos], "are both called 'beta_1'"),
        ([released, "nowhere"], "There is no folder 'nowhere'"),
        ([released, str(tmp_path / "flat")], "has no class folders"),
        ([released, str(tmp_path / "training")], "has train but no val"),
        ([released, str(tmp_path / "few")], "4 photos are held out, too few"),
        ([released, photos, "--held-out", photos + "/train"], "10 photos are held out, too few"),
        ([released, str(tmp_path / "few"), "--held-out", photos + "/val"], "'n00000004' that the photos"),
        ([released, photos, "--held-out", photos + "/val"], "has photos that are evaluated"),
        ([released, photos, "--held-out", "nowhere"], "There is no folder 'nowhere'"),
        (
            [released, photos, "--classes", str(tmp_path / "classes.csv")],
            "lists 1 classes that are not the 5",
        ),
        ([released, photos, "--classes", released], "is not a table with the columns"),
        ([released, photos, "--photo", "nothing.jpg"], "There is no 'nothing.jpg'"),
        ([released, photos, "--held-out-share", "1"], "must be above 0 and below 1"),
        ([released, photos, "--imags", "3"], "--imags"),
        ([released], "Name one or more checkpoints"),
        ([resnet, photos], "need a generative model with a beta above 0"),
    ):
        share = [] if "--held-out-share" in arguments else ["--held-out-share", "0.5"]
        assert message in refused([*arguments, *out, *share], capsys), arguments
    four = tmp_path / "four-classes"
    make_photos(four, 20)
    (four / "n00000004").rename(tmp_path / "fifth")
    line = refused([released, str(four), *out, "--held-out-share", "0.5"], capsys)
    assert "has 5 classes and" in line and "4 class folders" in line
    model = candid.load(resnet)
    model.class_names = tuple("abcde")
    candid.save(model, tmp_path / "named")
    line = refused([str(tmp_path / "named"), photos, *out, "--held-out-share", "0.5"], capsys)
    assert "has classes of its own, such as 'a'" in line
