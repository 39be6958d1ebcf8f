"""The demonstration, with fewer epochs and attacks."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from candid.cli import demo as cli_demo


def test_demo_trains_audits_and_examines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_demo, "ATTACKED", 1)
    cli_demo.demo(tmp_path, epochs=6)
    printed = capsys.readouterr().out
    accuracy, bits, _ = re.findall(r"│ +([\d.]+) %? *│ +([\d.]+) │ +([\d.]+) % │", printed)[0]
    assert float(accuracy) > 80
    assert 3 < float(bits) < 9
    flagged = {name: int(share) for name, share in re.findall(r"│ ([a-z ]+?) +│ +(\d+) % │", printed)}
    assert flagged["test digits"] < 20
    assert flagged["random pixels"] == flagged["inverted digits"] == 100
    error = re.search(r"largest error (\S+)", printed)
    assert error is not None and float(error[1]) < 1e-4
    for name in (
        "digits.png",
        "calibration.png",
        "counterfactuals.png",
        "round_trip.png",
        "digits/curves.png",
    ):
        with Image.open(tmp_path / name) as figure:
            assert figure.width > 400
    assert (tmp_path / "audit" / "audit.html").stat().st_size < 8e6
    photos = tmp_path / "photos"
    assert sorted(file.stem for file in photos.glob("*.jpg")) == [
        "astronaut",
        "cat",
        "coffee",
        "moose",
        "rocket",
    ]
    command = re.findall(r"Try your own photos: (.*) serve cifar10-beta1\n", printed)[0]
    version = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("candid ")  # the command works as it is printed
    for photo in photos.glob("*.jpg"):
        assert str(photo) in printed
        with Image.open(photos / f"{photo.stem}.page.png") as page:
            assert page.width > 400
