"""The command line: what it prints, where, and with which exit code; as a program where that matters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import candid
from candid.cli.app import main
from tests.helpers import candid_command, small_classifier

CANDID = Path(sys.executable).with_name("candid")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CANDID, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_info_of_the_imagenet_preset_as_json() -> None:
    done = candid_command("info", "imagenet", "--json")
    assert done.exit_code == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    assert found["network_parameters"] == 55_412_304
    assert found["total_parameters"] == 77_486_672
    assert found["gmacs"] == pytest.approx(9.08, rel=0.02)
    assert found["resnet"].keys() >= {"network_parameters", "total_parameters", "gmacs"}


def test_info_of_a_model_as_tables(tmp_path: Path) -> None:
    done = candid_command("info", candid.save(small_classifier(), tmp_path / "model"))
    assert done.exit_code == 0
    assert "generative" in done.stdout and "DCT / mean pooling" in done.stdout


def test_import_makes_a_model_that_loads(released_file: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefg"))
    done = candid_command("import", released_file, "--out", tmp_path / "model", "--class-names", names)
    assert done.exit_code == 0, done
    model = candid.load(tmp_path / "model")
    assert model.config.classes == 7 and model.class_names == tuple("abcdefg")


@pytest.fixture
def cut_model(tmp_path: Path) -> Path:
    folder = candid.save(small_classifier(), tmp_path / "model")
    record = folder / "model.json"
    record.write_bytes(record.read_bytes()[:100])
    return folder


def test_a_users_mistake_is_one_line_on_standard_error_and_code_2(
    cut_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = tmp_path / "foreign.pt"
    torch.save({"weights": torch.zeros(3)}, foreign)
    for arguments, message in (
        (("info", "imagnet"), "did you mean 'imagenet'?"),
        (("info", cut_model), "can't be read as JSON"),
        (("info", foreign), "candid import"),
        (("info", "digits", "--classes", 0), "at least 1"),
        (("info", "digits", "--mixing", "soft"), "orthogonal"),
        (("info", "a" * 300), "too long"),
        (("inof",), "info"),
        (("import", foreign, "--out", foreign), "is a file"),
        (("import", tmp_path / "none.pt", "--out", tmp_path / "out"), "There is no file"),
        (("import", foreign, "--out", tmp_path / "out"), "not a released ImageNet checkpoint"),
    ):
        monkeypatch.setattr(sys, "argv", ["candid", *map(str, arguments)])
        with pytest.raises(SystemExit, match="2"):
            main()
        found = capsys.readouterr()
        assert found.out == ""
        assert found.err.startswith("candid: ") and found.err.count("\n") == 1, found.err
        assert message in found.err
    assert not (tmp_path / "out").exists()


def test_version_and_help() -> None:
    assert run("--version").stdout.strip() == f"candid {candid.__version__}"
    assert "import" in run("--help").stdout


def test_a_reader_that_stops_early_sees_no_error(tmp_path: Path) -> None:
    model = candid.save(small_classifier(), tmp_path / "model")
    for i in range(40):
        Image.new("RGB", (16, 16), (i, i, i)).save(tmp_path / f"{'long' * 40}{i}.png")
    for table in ("", f"--out '{tmp_path / 't.csv'}'"):
        command = f"'{CANDID}' examine '{model}' '{tmp_path}' {table} | head -1"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.stdout.startswith("class")
        assert "roken pipe" not in done.stderr and "Error" not in done.stderr


def test_examine_without_a_model_uses_the_bundled_one(tmp_path: Path) -> None:
    network = tmp_path / "network.onnx"
    network.write_bytes(b"")
    samples = Path(candid.__file__).parent / "reports" / "demo" / "samples" / "everyday"
    for photos in ([samples / "jeans.jpg"], [f"{samples}/j*.jpg"], ["everyday", samples / "jeans.jpg"]):
        done = candid_command("examine", *photos, "--json")
        found = json.loads(done.stdout)
        assert (found["label"], found["verdict"]) == ("jean", "accept")
    for arguments in ((), ("everyday",)):
        done = candid_command("examine", *arguments)
        assert "Name the images" in str(done.exception)
    done = candid_command("examine", "missing.JPG")
    assert "no image, folder or match for 'missing.JPG'" in str(done.exception)
    usage = run("examine", "--help").stdout
    assert "[MODEL] IMAGES" in usage and "[required]" not in usage
    done = candid_command("examine", network, samples / "jeans.jpg")
    assert "network.onnx' is a file, but a model is a folder" in str(done.exception)
    done = candid_command("examine", "everday", samples / "jeans.jpg")
    assert "did you mean 'everyday'" in str(done.exception)
