"""The command that watches image files: real files, real processes, a real disk limit."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from candid import Watch
from candid.judging.watch_images import STATE, WatchState, in_order
from tests.helpers import candid_command

MODEL = "cifar10-resnet"


def make(folder: Path, images: int, start: int = 0) -> Path:
    """A folder of noise, which is unlike any photo."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(start)
    for i in range(start, start + images):
        pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:04d}.png")
    return folder


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("noise") / "images", 40)


def test_once_prints_one_object(noise: Path) -> None:
    done = candid_command("watch", MODEL, noise, "--once", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 3 and found["alarm"] is True and found["evidence"] >= 100
    assert 2 < found["after"] < 40 and found["since"] < 10 and found["images"] == 40
    assert found["carriers"][0]["name"].startswith(str(noise))
    assert not (noise / STATE).exists()
    told = candid_command("watch", MODEL, noise, "--once")
    assert told.stdout.startswith(f"ALARM after image {found['after']}") and str(noise) in told.stdout
    stricter = candid_command("watch", MODEL, noise, "--once", "--json", "--alarm", "1e-6")
    assert not json.loads(stricter.stdout)["alarm"] or json.loads(stricter.stdout)["after"] > found["after"]


def test_a_list_is_watched_in_its_order(noise: Path, tmp_path: Path) -> None:
    names = sorted(map(str, noise.glob("*.png")))
    list_ = tmp_path / "list.txt"
    list_.write_text("\n".join([*names[::-1], names[0], ""]))  # twice: counted once
    found = json.loads(candid_command("watch", MODEL, list_, "--once", "--json").stdout)
    assert found["images"] == 40
    by_number = {each["image"]: each["name"] for each in found["carriers"]}
    assert all(name == names[::-1][image - 1] for image, name in by_number.items())


def test_images_that_arrive_together_come_in_a_random_order(tmp_path: Path) -> None:
    flat = [tmp_path / f"{kind} {i:02d}.png" for kind in ("apple", "banana") for i in range(20)]
    mixed = in_order(flat, tmp_path)
    assert 3 < sum(path.name.startswith("apple") for path in mixed[:20]) < 17
    nested = [tmp_path / kind / f"{i:02d}.png" for kind in "ab" for i in range(20)]
    order = in_order(nested, tmp_path)
    assert sorted(order) == nested != order and order == in_order(nested[::-1], tmp_path)
    assert 3 < sum(path.parent.name == "a" for path in order[:20]) < 17


def test_a_state_goes_on_and_counts_each_image_once(noise: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.sqlite"
    some = tmp_path / "some"
    shutil.copytree(noise, some)
    later = [some / f"{i:04d}.png" for i in range(10, 40)]
    away = tmp_path / "away"
    away.mkdir()
    for path in later:
        path.rename(away / path.name)
    arguments = "watch", MODEL, some, "--once", "--json", "--state", state
    first = json.loads(candid_command(*arguments).stdout)
    assert first["images"] == 10
    for path in later:
        (away / path.name).rename(path)
        os.utime(path, (4e9, 4e9) if path.stem[-1] in "02468" else (0, 0))  # a clock that jumps
    second = json.loads(candid_command(*arguments).stdout)
    third = json.loads(candid_command(*arguments).stdout)
    whole = json.loads(candid_command("watch", MODEL, some, "--once", "--json").stdout)
    assert second == third and second["images"] == whole["images"] == 40
    assert second["alarm"] is whole["alarm"] is True
    moved = some.rename(tmp_path / "moved")
    assert json.loads(candid_command("watch", MODEL, moved, *arguments[3:]).stdout)["images"] == 40
    for wrong, option, message in (
        ("cifar10-beta1", ("--alarm", "0.01"), "another model"),
        (MODEL, ("--alarm", "0.05"), "was started with --alarm 0.01"),
        (MODEL, ("--among", "stream"), "was started with --among held-out"),
    ):
        done = candid_command("watch", wrong, moved, *arguments[3:], *option)
        assert done.exit_code == 2 and message in str(done.exception)


def test_an_alarm_is_said_until_it_is_acknowledged(noise: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(noise, tmp_path / "some")
    arguments = "watch", MODEL, folder, "--once", "--state", tmp_path / "state"
    assert candid_command(*arguments).exit_code == 3
    again = candid_command(*arguments)
    assert again.exit_code == 3 and again.stdout.startswith("ALARM after image")
    done = candid_command(*arguments, "--acknowledge")
    assert done.exit_code is None or done.exit_code == 0
    assert "acknowledged: ALARM after image" in done.stderr and done.stdout.startswith("No alarm after 0")
    assert candid_command(*arguments).stdout.startswith("No alarm after 0")
    assert "no alarm to acknowledge" in candid_command(*arguments, "--acknowledge").stderr
    make(folder, 40, start=60)
    assert candid_command(*arguments).exit_code == 3
    assert "name it with --state" in str(candid_command(*arguments[:4], "--acknowledge").exception)


def test_images_or_class_frequencies_are_watched_alone(noise: Path, tmp_path: Path) -> None:
    found = {}
    for kind in ("images", "classes", "both"):
        state = tmp_path / kind
        arguments = "watch", MODEL, noise, "--once", "--json", "--watch", kind, "--state", state
        found[kind] = json.loads(candid_command(*arguments).stdout)
        assert json.loads(candid_command(*arguments).stdout) == found[kind]
    assert found["images"]["directions"][0] == "more novel"
    assert all(
        each.startswith(("other class", "less", "more conf")) for each in found["classes"]["directions"]
    )
    assert found["images"]["after"] <= found["both"]["after"]  # it rings at 1 / level, both at 2 / level
    wrong = candid_command("watch", MODEL, noise, "--once", "--state", tmp_path / "images")
    assert "another --watch" in str(wrong.exception)


def test_broken_images_are_named_and_not_counted(noise: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "some", 3)
    (folder / "broken.png").write_bytes(b"\x89PNG and no more")
    done = candid_command("watch", MODEL, folder, "--once", "--json")
    assert done.exit_code == 2 and json.loads(done.stdout)["images"] == 3
    assert done.stderr.count("can't be used") == 1 and "broken.png" in done.stderr


@pytest.mark.parametrize("kind", ["folder", "list", "missing"])
def test_an_empty_stream_is_one_sentence(tmp_path: Path, kind: str) -> None:
    source = tmp_path / kind
    if kind == "folder":
        source.mkdir()
    elif kind == "list":
        source.write_text("\n\n")
    done = candid_command("watch", MODEL, source, "--once")
    assert done.exit_code == 2 and done.stdout == ""
    assert ("There is no folder" if kind == "missing" else "nothing to watch") in str(done.exception)


@pytest.mark.parametrize("content", [b"no database", b""])
def test_a_foreign_state_is_refused(noise: Path, tmp_path: Path, content: bytes) -> None:
    state = tmp_path / "state"
    state.write_bytes(content)
    if not content:
        with sqlite3.connect(state) as other:
            other.execute("CREATE TABLE mine (a)")
        other.close()
    done = candid_command("watch", MODEL, noise, "--once", "--state", state)
    assert done.exit_code == 2 and "--state" in str(done.exception)
    assert content == b"" or state.read_bytes() == content


def test_two_processes_cannot_share_a_state(noise: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.sqlite"
    arguments = "watch", MODEL, make(tmp_path / "some", 2), "--once", "--state", state
    assert candid_command(*arguments).exit_code == 0
    with sqlite3.connect(state) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "another process uses it" in str(candid_command(*arguments).exception)
    other.close()


def test_killed_while_watching_it_loses_and_repeats_nothing(noise: Path, tmp_path: Path) -> None:
    folder = make(tmp_path / "some", 10)
    command = [sys.executable, "-m", "candid", "watch", MODEL, str(folder), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        seen = json.loads(process.stdout.readline())["images"]
        later = sorted(noise.glob("*.png"))[10:40]
        for path in later:
            shutil.copy(path, folder)
        (folder / later[0].name).write_bytes(later[0].read_bytes()[:100])  # its writer was too slow
        while seen <= 10:
            seen = json.loads(process.stdout.readline())["images"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    shutil.copy(later[0], folder)
    state = folder / STATE
    done = candid_command("watch", MODEL, folder, "--once", "--json", "--state", state)
    found = json.loads(done.stdout)
    assert f"goes on after {seen}" in done.stderr and found["images"] == 40
    database = sqlite3.connect(state)
    assert database.execute("SELECT count(*) FROM counted").fetchone() == (40,)
    database.close()


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from candid import CandidError, Watch
from candid.judging.watch_images import WatchState

state = WatchState(Path(sys.argv[1]), "model", Watch().fit(range(200)))
state.watch.update(range(50))
state.count([str(i) for i in range(50)])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    for i in range(100):
        state.watch.update(range(50))
        state.count([f"{i} {j}" * 20 for j in range(50)])
except CandidError as error:
    print(error)
"""
    file = tmp_path / "state.sqlite"
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=True)
    assert "free some space" in done.stdout and done.stdout.count("\n") == 1
    state = WatchState(file, "model", Watch().fit([0.0]))
    assert state.watch.images == len(state.counted) >= 50  # what was written before is whole
    state.close()
