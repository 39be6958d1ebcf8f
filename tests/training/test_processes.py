"""Real processes: killed, stopped, out of space, and two at a time."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import candid
from tests.training.forks import Training
from tests.training.runs import MODEL, SMALL, curve, run, start, weights

SETTINGS = ["digits", *SMALL, "--epochs=6"]
PAIR = ["digits", *SMALL, "--epochs=4"]


def wait_for(path: Path, process: "Training | subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, path
        time.sleep(0.02)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts, with SETTINGS."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(*SETTINGS, "--out", folder).returncode == 0
    return folder


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by two processes that nothing interrupts, with PAIR, from a Python script."""
    folder = tmp_path_factory.mktemp("runs") / "pair"
    script = folder.with_name("script.py")
    script.write_text(
        f"import candid\n\ncandid.train('digits', model={MODEL}, epochs=4, devices=2, out={str(folder)!r})\n"
    )
    done = run(script, command=[sys.executable])
    assert done.returncode == 0, done.stderr
    return folder


def test_up_to_six_kills_leave_the_same_bits(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    moments = random.Random(0)
    process = Training(*SETTINGS, "--save-minutes=0", "--out", folder)
    wait_for(folder / "config.toml", process)
    kills = 0
    while kills < 6:
        time.sleep(moments.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        done = process.wait()
        kills += done.returncode == -signal.SIGKILL
        if done.returncode == 0:  # a fast machine finished it
            break
        process = Training("--resume", "--out", folder)
    assert kills
    if done.returncode:
        done = process.wait()
        assert done.returncode == 0, done.stderr
    assert weights(folder) == weights(whole)
    assert curve(folder, "val_loss") == curve(whole, "val_loss")
    assert not list(folder.rglob(".writing-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = Training(*SETTINGS, "--out", tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "metrics.csv", process)
    process.send_signal(number)
    done = process.wait()
    assert done.returncode == 0, done.stderr
    assert f"go on with: candid train --resume --out {tmp_path / 'stopped'}" in " ".join(done.stderr.split())
    step = torch.load(tmp_path / "stopped" / "state.pt", weights_only=True)["step"]
    assert 0 < step < 6 * 13
    assert Training("--resume", "--out", tmp_path / "stopped").wait().returncode == 0
    assert weights(tmp_path / "stopped") == weights(whole)


def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    process = Training(*SETTINGS, "--save-minutes=0", "--out", folder)
    wait_for(folder / "metrics.csv", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = (folder / "state.pt").read_bytes()
    limited = Training("--resume", "--out", folder, largest_file=20_000).wait()
    assert limited.returncode == 2, limited.stderr
    *_, message = limited.stderr.strip().splitlines()
    assert message.startswith("candid: Can't") and "unharmed" in message
    assert (folder / "state.pt").read_bytes() == before
    candid.load(folder / "model" / "last")
    assert Training("--resume", "--out", folder).wait().returncode == 0
    assert weights(folder) == weights(whole)


@pytest.mark.slow
def test_two_processes_follow_the_curve_of_one(pair: Path, tmp_path: Path) -> None:
    """Exactly, if the one cuts its batch in the same two parts; else as far as batch norm lets it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    runs = {
        "one": Training(*PAIR, "--out", tmp_path / "one").wait(),
        "parts": Training(*PAIR, "--grad-accumulation=2", "--out", tmp_path / "parts").wait(),
        "torchrun": run(*PAIR, "--out", tmp_path / "torchrun", command=[*torchrun, "candid", "train"]),
    }
    for name, process in runs.items():
        assert process.returncode == 0, (name, process.stderr)
    for column in ("train_loss", "train_bits_per_dim", "train_cross_entropy"):
        one, parts, elastic = (curve(tmp_path / name, column) for name in runs)
        devices = curve(pair, column)
        assert devices == pytest.approx(parts, rel=1e-4)
        assert elastic == devices
        assert devices == pytest.approx(one, rel=0.1)
    assert weights(tmp_path / "torchrun") == weights(pair)
    norms = [
        torch.cat([p.detach().flatten() for p in candid.load(folder / "model/last").parameters()]).norm()
        for folder in (tmp_path / "parts", pair)
    ]
    assert float(norms[1] / norms[0]) == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_two_processes_stop_and_resume_together(pair: Path, tmp_path: Path) -> None:
    process = start(*PAIR, "--devices=2", "--out", tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "metrics.csv", process)
    process.send_signal(signal.SIGTERM)  # to the first one alone
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert run("--resume", "--devices=2", "--out", tmp_path / "stopped").returncode == 0
    assert weights(tmp_path / "stopped") == weights(pair)


def test_a_mistake_is_one_line_however_many_processes(tmp_path: Path) -> None:
    line = ["digits", "--batch=5001", "--out", str(tmp_path / "run")]
    for process in (Training(*line).wait(), run(*line, "--devices=2")):
        assert process.returncode == 2
        assert process.stderr.strip().count("\n") == 0, process.stderr
        assert process.stderr.startswith("candid: A batch of 5001 is larger than the")
