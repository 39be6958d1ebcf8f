"""Real processes: killed, stopped, out of space, and two at a time."""

import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import candid
from tests.training.runs import COMMAND, MODEL, SMALL, curve, environment, run, start, weights

SETTINGS = ["digits", *SMALL, "--epochs=12"]
PAIR = ["digits", *SMALL, "--epochs=4"]


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
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
    process = start(*SETTINGS, "--save-minutes=0", "--out", folder)
    kills = 0
    while kills < 6:
        wait_for(folder / "config.toml", process)
        time.sleep(moments.uniform(0, 0.5))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if process.returncode == 0:  # a fast machine finished it
            break
        process = start("--resume", "--out", folder)
        time.sleep(moments.uniform(2, 4))
    assert kills
    if process.returncode is None:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    assert weights(folder) == weights(whole)
    assert curve(folder, "val_loss") == curve(whole, "val_loss")
    assert not list(folder.rglob(".writing-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(*SETTINGS, "--out", tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "metrics.csv", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"go on with: candid train --resume --out {tmp_path / 'stopped'}" in " ".join(err.split())
    step = torch.load(tmp_path / "stopped" / "state.pt", weights_only=True)["step"]
    assert 0 < step < 12 * 13
    assert run("--resume", "--out", tmp_path / "stopped").returncode == 0
    assert weights(tmp_path / "stopped") == weights(whole)


def test_a_full_disk_loses_nothing(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    process = start(*SETTINGS, "--save-minutes=0", "--out", folder)
    wait_for(folder / "metrics.csv", process)
    process.kill()
    process.communicate()
    before = (folder / "state.pt").read_bytes()
    limited = subprocess.run(
        [*COMMAND, "--resume", "--out", str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert limited.returncode == 2, limited.stderr
    *_, message = limited.stderr.strip().splitlines()
    assert message.startswith("candid: Can't") and "unharmed" in message
    assert (folder / "state.pt").read_bytes() == before
    candid.load(folder / "model" / "last")
    assert run("--resume", "--out", folder).returncode == 0
    assert weights(folder) == weights(whole)


def test_two_processes_follow_the_curve_of_one(pair: Path, tmp_path: Path) -> None:
    """Exactly, if the one cuts its batch in the same two parts; else as far as batch norm lets it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    runs = {
        "one": run(*PAIR, "--out", tmp_path / "one"),
        "parts": run(*PAIR, "--grad-accumulation=2", "--out", tmp_path / "parts"),
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


def test_two_processes_stop_and_resume_together(pair: Path, tmp_path: Path) -> None:
    process = start(*PAIR, "--devices=2", "--out", tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "metrics.csv", process)
    process.send_signal(signal.SIGTERM)  # to the first one alone
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert run("--resume", "--devices=2", "--out", tmp_path / "stopped").returncode == 0
    assert weights(tmp_path / "stopped") == weights(pair)


def test_a_mistake_is_one_line_however_many_processes(tmp_path: Path) -> None:
    for devices in ("1", "2"):
        process = run("digits", "--batch=5001", f"--devices={devices}", "--out", tmp_path / "run")
        assert process.returncode == 2
        assert process.stderr.strip().count("\n") == 0, process.stderr
        assert process.stderr.startswith("candid: A batch of 5001 is larger than the")
