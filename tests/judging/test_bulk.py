"""Many images: shards in, a table for each out; killed and resumed, in parts and in several processes."""

import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from candid import CandidError
from candid.judging import bulk
from tests.helpers import candid_command
from tests.photo_models import PhotoRun, photo

Rows = dict[str, list[dict[str, str]]]


def _png(kind: str, seed: int) -> bytes:
    content = io.BytesIO()
    photo(kind, seed).save(content, "PNG")
    return content.getvalue()


def _tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tar files, a zip file and a few photos; one photo of each archive is cut."""
    folder = tmp_path_factory.mktemp("bulk") / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(3):
        files = {f"{i}.png": _png("dots", 900 + 10 * number + i) for i in range(4)}
        cut = {"cut.png": files["0.png"][:200], "notes.txt": b"no photo", ".hidden.png": b""}
        _tar(folder / f"part-{number}.tar", files | cut)
    with zipfile.ZipFile(folder / "last.zip", "w") as archive:
        archive.writestr("in/rings.png", _png("rings", 950))
        archive.writestr("cut.png", b"no photo")
    for i in range(3):
        (folder / "more" / f"stripes {i}.png").write_bytes(_png("stripes", 960 + i))
    return folder


def _rows(out: Path) -> Rows:
    tables = {}
    for path in sorted(out.glob("*.csv")):
        with path.open(newline="") as file:
            tables[path.name] = list(csv.DictReader(file))
    return tables


@pytest.fixture(scope="module")
def whole(photo_run: PhotoRun, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    out = tmp_path_factory.mktemp("whole") / "verdicts"
    done = candid_command("examine", photo_run.model, shards, "--out", out)
    assert done.exit_code == 2 and "4 unusable" in done.stderr and "tables: 5 to write" in done.stderr
    assert "5 of 5 shards" in done.stderr and "images/s, 0:00:00 left" in done.stderr
    assert json.loads((out / bulk.SETTINGS).read_text())["promises"]["plain"]
    return _rows(out)


def test_each_shard_has_a_table_with_the_verdicts_of_its_images(
    photo_run: PhotoRun, shards: Path, whole: Rows, tmp_path: Path
) -> None:
    assert [name.split("-")[0] for name in whole] == ["last.csv", "part", "part", "part", "photos"]
    rows = whole["part-1.csv"]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "2.png", "3.png", "cut.png"]
    assert rows[4]["error"] and not rows[4]["verdict"]
    with tarfile.open(shards / "part-1.tar") as tar:
        tar.extractall(tmp_path / "files", filter="data")
    candid_command("examine", photo_run.model, tmp_path / "files", "--out", tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        alone = list(csv.DictReader(file))
    assert [{**row, "path": ""} for row in rows] == [{**row, "path": ""} for row in alone]


def test_parts_and_processes_give_the_same_tables(
    photo_run: PhotoRun, shards: Path, whole: Rows, tmp_path: Path
) -> None:
    for part in ("0/2", "1/2"):
        candid_command("examine", photo_run.model, shards, "--out", tmp_path / "parts", "--shard", part)
        assert len(_rows(tmp_path / "parts")) == {"0/2": 3, "1/2": 5}[part]
    assert _rows(tmp_path / "parts") == whole
    command = [sys.executable, "-m", "candid", "examine", photo_run.model, str(shards)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "two"), "--processes", "2"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "4 unusable" in done.stderr
    assert _rows(tmp_path / "two") == whole


def test_killed_and_resumed_it_gives_the_same_tables(
    photo_run: PhotoRun, shards: Path, whole: Rows, tmp_path: Path
) -> None:
    """A pipe that gives nothing more stops the second shard in its middle; there the process is killed."""
    out, stuck = tmp_path / "verdicts", tmp_path / "stuck"
    stuck.mkdir()
    content = (shards / "part-1.tar").read_bytes()
    (stuck / "part-0.tar").write_bytes((shards / "part-0.tar").read_bytes())
    os.mkfifo(stuck / "part-1.tar")
    command = [sys.executable, "-m", "candid", "examine", photo_run.model, "part-0.tar", "part-1.tar"]
    process = subprocess.Popen([*command, "--out", str(out)], cwd=stuck, stderr=subprocess.DEVNULL)
    with (stuck / "part-1.tar").open("wb", buffering=0) as pipe:
        pipe.write(content[: len(content) // 2])
        deadline = time.monotonic() + 120
        while not list(out.glob(".writing-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name for path in out.glob("*.csv")] == ["part-0.csv"] and list(out.glob(".writing-*"))
    first = (out / "part-0.csv").stat().st_mtime_ns
    (stuck / "part-1.tar").unlink()
    (stuck / "part-1.tar").write_bytes(content)
    done = subprocess.run([*command, "--out", str(out)], cwd=stuck, capture_output=True, text=True)
    assert "tables: 1 to write, 1 exist already" in done.stderr
    assert (out / "part-0.csv").stat().st_mtime_ns == first
    for name, rows in _rows(out).items():
        expected = [{**row, "path": row["path"].removeprefix(f"{shards}/")} for row in whole[name]]
        assert rows == expected
    assert len(_rows(out)) == 2


def test_a_shard_that_is_cut_has_no_table_and_does_not_end_the_others(
    photo_run: PhotoRun, shards: Path, tmp_path: Path
) -> None:
    content = (shards / "part-0.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: len(content) // 2])
    (tmp_path / "b.tar").write_bytes(content[: 512 * (content.index(b"cut.png") // 512)])
    (tmp_path / "c.zip").write_bytes(b"no zip")
    (tmp_path / "d.tar").write_bytes(content)
    done = candid_command("examine", photo_run.model, tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 2 and "3 shards can't be read" in done.stderr
    assert done.stderr.count("The shard '") == 3 and "its end is missing" in done.stderr
    assert [path.name for path in (tmp_path / "out").glob("*.csv")] == ["d.csv"]


def test_wrong_use_is_one_sentence(photo_run: PhotoRun, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    candid_command("examine", photo_run.model, shards / "last.zip", "--out", out)
    wrong = {
        "has tables of a different model": ("--out", out, "--novelty", "0.2"),
        "--shard takes I/N": ("--out", out, "--shard", "2/2"),
        "--fdr does not go with a folder": ("--out", out, "--fdr", "0.1"),
        "holds many images: name a folder": (),
    }
    archive, second = shards / "last.zip", tmp_path / "last.tar"
    second.touch()
    for sentence, options in wrong.items():
        assert sentence in _error(photo_run.model, archive, *options)
    assert "are for a folder of tables" in _error(photo_run.model, photo_run.photos[0], "--processes", "2")
    assert "would both be written to 'last'" in _error(photo_run.model, archive, second, "--out", out)


def _error(*arguments: object) -> str:
    done = candid_command("examine", *arguments)
    assert isinstance(done.exception, CandidError)
    return str(done.exception)


def test_urls_through_fsspec(photo_run: PhotoRun, shards: Path, whole: Rows, tmp_path: Path) -> None:
    url = f"file://{shards}/part-*.tar"
    candid_command("examine", photo_run.model, url, "--out", tmp_path / "out")
    tables = _rows(tmp_path / "out")
    assert list(tables) == ["part-0.csv", "part-1.csv", "part-2.csv"]
    assert [row["p_value"] for row in tables["part-2.csv"]] == [row["p_value"] for row in whole["part-2.csv"]]


def test_parquet_in_and_out_or_one_sentence(photo_run: PhotoRun, tmp_path: Path) -> None:
    arguments = ("examine", photo_run.model, tmp_path / "in.parquet", "--out", tmp_path / "out")
    if importlib.util.find_spec("pyarrow") is None:
        (tmp_path / "in.parquet").touch()
        error = _error(*arguments[1:], "--table", "parquet")
        assert error == "Writing Parquet needs pyarrow: pip install 'candid-vision[bulk]'."
        return
    import pyarrow
    from pyarrow import parquet

    contents = [path.read_bytes() for path in photo_run.photos]
    images = [*({"bytes": content, "path": f"{i}.png"} for i, content in enumerate(contents)), None]
    parquet.write_table(pyarrow.table({"label": [0, 1, 2, 0], "image": images}), tmp_path / "in.parquet")
    done = candid_command(*arguments, "--table", "parquet")
    assert done.exit_code == 2
    rows = parquet.read_table(tmp_path / "out" / "in.parquet").to_pylist()
    names = [row["path"].removeprefix(f"{tmp_path}/in.parquet/") for row in rows]
    assert names == ["0.png", "1.png", "2.png", "3"]
    assert [bool(row["verdict"]) for row in rows] == [True, True, True, False]
    assert rows[3]["error"] == "its row has no bytes" and len(rows[0]["top_classes"]) == 3
