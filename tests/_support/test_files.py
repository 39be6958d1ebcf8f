"""Locks, digests of caches, errors of the operating system, and tables that a spreadsheet opens."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import candid
from candid import CandidError
from candid._support.files import (
    TEMPORARY,
    locked,
    read_sealed,
    remove_unfinished,
    replacing,
    system_error,
    write_sealed,
    write_tensors,
    write_texts,
)
from candid._support.numbers import digest, tensors_of
from candid._support.text import as_csv, html_page
from tests.helpers import small_classifier
from tests.training.runs import environment, small_config, train

HOLDS = """
import multiprocessing, pathlib, sys, time
from candid._support.files import locked
with locked(pathlib.Path(sys.argv[1]), "trains in"):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            with pytest.raises(CandidError, match=f"Another process trains in '{tmp_path}': wait"):
                train(small_config(), tmp_path)
            process.kill()
            process.wait()
            with locked(tmp_path, "trains in"):  # the forked child, which lives on, does not hold it
                assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()
            subprocess.run(["kill", "-9", str(child)], check=True)


def test_loading_during_saves_reads_a_whole_model(tmp_path: Path) -> None:
    models = [small_classifier(seed=seed) for seed in (0, 1)]
    means = [model.mixture.mean.detach().clone() for model in models]
    candid.save(models[0], tmp_path)
    done = threading.Event()

    def save(model: candid.GenerativeClassifier) -> None:
        while not done.is_set():
            candid.save(model, tmp_path)

    threads = [threading.Thread(target=save, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            found = candid.load(tmp_path).mixture.mean
            assert any(torch.equal(found, mean) for mean in means)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_sealed_file_notices_any_change(tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    write_sealed({"a": np.arange(3), "b": torch.zeros(2, 2)}, file, state="x")
    arrays, notes = read_sealed(file)
    assert notes == {"state": "x"} and np.array_equal(arrays["a"], np.arange(3))
    assert arrays["b"].dtype == np.float32 and arrays["b"].shape == (2, 2)
    content = file.read_bytes()
    for damaged in (content[:-1] + b"\1", content[:-1], content.replace(b'"x', b'"y'), b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="whole|changed|Expecting"):
            read_sealed(file)


STORED = (
    "0e89e8517f5ae241a3380dd4793bf7957212dc1b5eb1c95679ca5007a298029b",
    "389a9cb6bca4b4ec309ebf98861dfe1d6444bf04684485dc9b668803eac2cd71",
    "756e29499d4a04179265df4e42aa919256f46e3d9c2e9508fa5cbafe9b9e8688",
)
"""Digests that version 0.1.0 computed from tensors: models and caches store such digests."""


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_digests_are_those_of_stored_models(convert: Callable[[Any], Any], tmp_path: Path) -> None:
    matrix = convert(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert digest(matrix, {"b": 1, "a": [1, 2.5]}, "text", b"bytes", None).hexdigest() == STORED[0]
    others = (np.arange(6, dtype=np.float16), np.array([True, False]), np.arange(4, dtype=np.int16))
    assert digest(*map(convert, others), convert(np.array(7))).hexdigest() == STORED[1]
    turned = convert(np.arange(6.0).reshape(3, 2)).T
    write_sealed({"w": turned, "k": convert(np.array([1, 2]))}, tmp_path / "sealed", state="x")
    assert STORED[2].encode() in (tmp_path / "sealed").read_bytes()


def test_arrays_of_every_type_come_back(tmp_path: Path) -> None:
    types = (np.float16, np.float32, np.float64, np.int16, np.int64, np.uint8, np.bool_)
    written = {np.dtype(kind).name: np.arange(6).reshape(2, 3).astype(kind) for kind in types}
    written |= {"scalar": np.array(2.5), "empty": np.zeros((0, 4)), "turned": np.arange(6).reshape(2, 3).T}
    write_tensors(written, tmp_path / "file", {"note": "a"})
    read = tensors_of((tmp_path / "file").read_bytes())
    assert read.keys() == written.keys()
    for name, array in written.items():
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
        assert np.array_equal(read[name], array) and read[name].flags.writeable


def test_a_clock_that_was_wrong_removes_nothing_of_others_and_keeps_nothing_for_ever(tmp_path: Path) -> None:
    for moment in (0, 4_000_000_000):
        room = tmp_path / f"{TEMPORARY}{moment}"
        room.mkdir()
        os.utime(room, (moment, moment))
    remove_unfinished(tmp_path, older=60)
    assert [room.name for room in tmp_path.iterdir()] == [f"{TEMPORARY}4000000000"]
    remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught, replacing(tmp_path / "a.png"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert system_error(caught.value) == (
        f"'{tmp_path / 'a.png'}' can't be written, the disk is full: free some space, then run the command "
        "again."
    )
    assert str(caught.value) == f"[Errno 28] No space left on device: '{tmp_path / 'a.png'}'"
    denied = PermissionError(errno.EACCES, "Permission denied", "run/config.toml")
    assert "'run/config.toml' can't be used" in system_error(denied)


def test_text_cells_are_no_formulas_and_numbers_stay() -> None:
    rows = [("=1+1", "+a", "-b", "@c", "-0.5", -0.5, -3, "+1e3", "a=b", None)]
    assert as_csv(rows) == "'=1+1,'+a,'-b,'@c,-0.5,-0.5,-3,+1e3,a=b,\n"


LISTENS = """
import os
from candid._support.processes import launch
fabric = launch(2)
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
own = {os.readlink(link) for link in links if os.path.islink(link)}
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and f"socket:[{parts[9]}]" in own:
            os.write(1, parts[1].split(":")[0].encode() + b"\\n")  # at once: both processes write
fabric.barrier()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_on_one_machine_open_no_port_to_others(tmp_path: Path) -> None:
    script = tmp_path / "listens.py"
    script.write_text(LISTENS)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment(), timeout=240
    )
    found = set(done.stdout.split())
    assert done.returncode == 0 and found == {"0100007F"}, (found, done.stderr)


def test_control_characters_never_reach_tables_and_pages(tmp_path: Path) -> None:
    name = "a\x1b[31m\x07\r\x9b.jpg"
    page = html_page(name, {name: ((name,), [])})
    write_texts({"a.csv": as_csv([[name, "=1"]]), "a.html": page, "a.txt": name}, tmp_path)
    for file in ("a.csv", "a.html"):
        text = (tmp_path / file).read_bytes().decode()
        assert all(c.isprintable() or c == "\n" for c in text), file
        assert r"a\x1b[31m\x07\r\x9b.jpg" in text
    assert (tmp_path / "a.txt").read_bytes().decode() == name  # names are read again from such files
