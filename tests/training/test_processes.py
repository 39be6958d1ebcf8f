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
from tests.training.runs import COMMAND, SMALL, curve, environment, run, start, weights


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def test_ten_kills_leave_the_same_bits(tmp_path: Path) -> None:
    settings = ["digits", *SMALL, "--epochs=12", "--save-minutes=0"]
    assert run(*settings, "--out", tmp_path / "whole").returncode == 0
    folder = tmp_path / "killed"
    moments = random.Random(0)
    process = start(*settings, "--out", folder)
    for _ in range(10):
        wait_for(folder / "config.toml", process)
        time.sleep(moments.uniform(0, 0.5))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it must have been killed, not have finished"
        process = start("--resume", "--out", folder)
        time.sleep(moments.uniform(2, 4))
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert weights(folder) == weights(tmp_path / "whole")
    assert curve(folder, "val_loss") == curve(tmp_path / "whole", "val_loss")
    assert not list(folder.rglob(".writing-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    settings = ["digits", *SMALL, "--epochs=10"]
    assert run(*settings, "--out", tmp_path / "whole").returncode == 0
    process = start(*settings, "--out", tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "metrics.csv", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"go on with: candid train --resume --out {tmp_path / 'stopped'}" in " ".join(err.split())
    step = torch.load(tmp_path / "stopped" / "state.pt", weights_only=True)["step"]
    assert 0 < step < 10 * 13
    assert run("--resume", "--out", tmp_path / "stopped").returncode == 0
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    settings = ["digits", *SMALL, "--epochs=6", "--save-minutes=0"]
    assert run(*settings, "--out", tmp_path / "whole").returncode == 0
    folder = tmp_path / "full"
    process = start(*settings, "--out", folder)
    wait_for(folder / "metrics.csv", process)
    process.kill()
    process.communicate()
    before = (folder / "state.pt").read_bytes()
    limited = subprocess.run(
        [*COMMAND, "--resume", "--out", str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert limited.returncode == 2, limited.stderr
    *_, message = limited.stderr.strip().splitlines()
    assert message.startswith("candid: Can't") and "unharmed" in message
    assert (folder / "state.pt").read_bytes() == before
    candid.load(folder / "model" / "last")
    assert run("--resume", "--out", folder).returncode == 0
    assert weights(folder) == weights(tmp_path / "whole")


def test_two_processes_follow_the_curve_of_one(tmp_path: Path) -> None:
    """Exactly, if the one cuts its batch in the same two parts; else as far as batch norm lets it."""
    settings = ["digits", *SMALL, "--epochs=4"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    runs = {
        "one": run(*settings, "--out", tmp_path / "one"),
        "parts": run(*settings, "--grad-accumulation=2", "--out", tmp_path / "parts"),
        "devices": run(*settings, "--devices=2", "--out", tmp_path / "devices"),
        "torchrun": run(*settings, "--out", tmp_path / "torchrun", command=[*torchrun, "candid", "train"]),
    }
    for name, process in runs.items():
        assert process.returncode == 0, (name, process.stderr)
    for column in ("train_loss", "train_bits_per_dim", "train_cross_entropy"):
        one, parts, devices, elastic = (curve(tmp_path / name, column) for name in runs)
        assert devices == pytest.approx(parts, rel=1e-4)
        assert elastic == devices
        assert devices == pytest.approx(one, rel=0.1)
    assert weights(tmp_path / "torchrun") == weights(tmp_path / "devices")
    norms = [
        torch.cat(
            [p.detach().flatten() for p in candid.load(tmp_path / name / "model/last").parameters()]
        ).norm()
        for name in ("parts", "devices")
    ]
    assert float(norms[1] / norms[0]) == pytest.approx(1, abs=1e-4)


def test_two_processes_stop_and_resume_together(tmp_path: Path) -> None:
    settings = ["digits", *SMALL, "--epochs=6", "--devices=2"]
    assert run(*settings, "--out", tmp_path / "whole").returncode == 0
    process = start(*settings, "--out", tmp_path / "stopped")
    wait_for(tmp_path / "stopped" / "metrics.csv", process)
    process.send_signal(signal.SIGTERM)  # to the first one alone
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert run("--resume", "--devices=2", "--out", tmp_path / "stopped").returncode == 0
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_mistake_is_one_line_however_many_processes(tmp_path: Path) -> None:
    for devices in ("1", "2"):
        process = run("digits", "--batch=5001", f"--devices={devices}", "--out", tmp_path / "run")
        assert process.returncode == 2
        assert process.stderr.strip().count("\n") == 0, process.stderr
        assert process.stderr.startswith("candid: A batch of 5001 is larger than the")
