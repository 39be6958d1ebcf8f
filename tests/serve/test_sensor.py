"""A server as a sensor: a watch that survives a restart, and storage that is bounded."""

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from candid._support.errors import CandidError
from candid.judging.examine import image_paths
from candid.judging.store import IMAGES, RECORDS, Storage
from candid.serve import ServeOptions
from candid.serve.schemas import EncodedResponse
from candid.serve.sensor import Sensor
from candid.serve.served import Drift
from candid.serve.service import Service
from candid.trust.verdict import Sighting
from tests.helpers import candid_command, small_classifier
from tests.serve.helpers import Running, picture, running


@contextmanager
def sensing(service: Service, **options: Any) -> Iterator[Running]:
    """A server with a state or a store."""
    sensor = Sensor.of(ServeOptions(**options))
    with running(service, sensor=sensor) as found:
        yield found


def test_judged_images_are_watched_and_others_are_not(server: Running) -> None:
    before = server.client.get("/v1/drift").json()
    assert before["watching"] and before["level"] == 0.01 and before["held_out"] == 150 - 150 // 4
    server.examine(picture(1), b"no image", picture(2))
    after = server.client.get("/v1/drift").json()
    assert after["images"] == before["images"] + 2
    assert server.metric("candid_drift_images") == after["images"]
    assert server.metric("candid_drift_evidence") == pytest.approx(after["evidence"])
    assert server.metric("candid_drift_alarm") == float(after["alarm"])
    assert all(each["name"] is None for each in after["carriers"])  # names of others' files are not told


def test_an_alarm_is_shown_everywhere(service: Service) -> None:
    with running(service) as found:
        for _ in range(8):
            found.examine(*[plain(i) for i in range(8)])
        drift = found.client.get("/v1/drift").json()
        assert drift["alarm"] and drift["after"] <= 64 and drift["evidence"] >= 100 and drift["directions"]
        assert "ALARM" in drift["sentence"]
        assert found.metric("candid_drift_alarm") == 1


def plain(i: int) -> bytes:
    """A picture of one colour: unlike noise."""
    file = BytesIO()
    Image.new("RGB", (16, 16), (10 * i, 80, 99)).save(file, "PNG")
    return file.getvalue()


def test_a_model_without_held_out_scores_is_not_watched() -> None:
    with running(Service(small_classifier(), "bare")) as found:
        found.examine(picture(1))
        assert found.client.get("/v1/drift").json()["watching"] is False
        assert found.client.get("/v1/verdicts").status_code == 404


def test_the_state_survives_a_restart(service: Service, tmp_path: Path) -> None:
    with sensing(service, state=tmp_path / "state") as found:
        found.examine(picture(1), picture(2))
        first = found.client.get("/v1/drift").json()
    with sensing(service, state=tmp_path / "state") as found:
        assert found.client.get("/v1/drift").json() == first
        found.examine(picture(3))
        assert found.client.get("/v1/drift").json()["images"] == 3
    assert first["proven"] is True
    other = Drift(service.description.watch, "another model", tmp_path / "state")
    assert other.images == 0 and len(list((tmp_path / "state").glob("*.sqlite"))) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(CandidError, match="--state"):
        Drift(service.description.watch, "model", tmp_path / "file")


def test_a_state_is_never_replaced_by_an_older_one_or_by_another_server(
    service: Service, tmp_path: Path
) -> None:
    drift = Drift(service.description.watch, "model", tmp_path)
    seen = EncodedResponse("accept", b"", Sighting(0.0, 0, 0.5))
    assert drift.state is not None
    drift.see([seen], [None])
    older = drift.state.watch.to_json()
    drift.see([seen], [None])
    with pytest.raises(CandidError, match="another process uses it"):
        Drift(service.description.watch, "model", tmp_path)
    drift.state.count([])
    drift.state.store(older, 1)  # by a slower thread
    drift.close()
    again = Drift(service.description.watch, "model", tmp_path)
    assert again.images == 2
    again.close()


def test_stored_images_are_listed_unknown_ones_first(service: Service, tmp_path: Path) -> None:
    sent = [picture(1), plain(3), picture(2)]
    with sensing(service, store=tmp_path, state=tmp_path / "state") as found:
        assert found.client.get("/v1/models").json()["models"][0]["stores_images"]
        answers = found.examine(sent[0], b"no image", *sent[1:]).json()["results"]
        answers = [each for each in answers if each["status"] == "judged"]
        listed = found.client.get("/v1/verdicts").json()
        assert sum(listed["stored"].values()) == len(listed["verdicts"]) == 3
        order = ["novel", "ambiguous", "accept"]
        kinds = [order.index(each["verdict"]) for each in listed["verdicts"]]
        assert kinds == sorted(kinds)
        for each in listed["verdicts"]:
            answer = answers[each["id"] - 1]
            assert {k: each[k] for k in ("verdict", "label", "confidence", "p_value")} == {
                k: answer[k] for k in ("verdict", "label", "confidence", "p_value")
            }
            shown = found.client.get("/v1/verdicts/image", params={"id": each["id"]})
            assert shown.headers["content-type"] == "image/png" and shown.content.startswith(b"\x89PNG")
        assert found.client.get("/v1/verdicts/image", params={"id": 99}).status_code == 404
        assert len(found.client.get("/v1/verdicts", params={"limit": 1}).json()["verdicts"]) == 1
    kept = image_paths([str(tmp_path / IMAGES)])
    assert [path.read_bytes() for path in kept] == sent  # what other commands start from


def test_a_server_without_a_store_stores_nothing(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with running(service) as found:
        assert not found.client.get("/v1/models").json()["models"][0]["stores_images"]
        found.examine(picture(1))
        assert found.client.get("/v1/verdicts").status_code == 404
    assert list(tmp_path.iterdir()) == []


def test_storage_is_bounded_oldest_first_out(tmp_path: Path) -> None:
    storage = Storage(tmp_path, 1000)
    for i in range(30):
        assert storage.add(b"\x89PNG" + bytes([i]) * 96, "accept", "{}") is not None
    files = sorted(path.name for path in (tmp_path / IMAGES).iterdir())
    assert files == [f"{i:09d}.png" for i in range(21, 31)]
    assert [each.id for each in storage.last(50)] == list(range(30, 20, -1))
    storage.add(b"II*\0" + bytes(2000), "novel", "{}")  # larger than the bound: nothing stays
    assert storage.last(50) == [] and list((tmp_path / IMAGES).iterdir()) == []
    storage.add(b"\xff\xd8", "novel", "{}")
    assert [each.file for each in storage.last(50)] == ["000000032.jpg"]  # numbers are not used again
    storage.close()
    smaller = Storage(tmp_path, 1)
    assert smaller.last(50) == []
    smaller.close()


def test_what_a_killed_process_left_is_repaired(tmp_path: Path) -> None:
    storage = Storage(tmp_path, 10**6)
    names = [storage.add(b"BM" + bytes([i]), "accept", "{}") for i in range(3)]
    storage.close()
    (tmp_path / IMAGES / str(names[0])).unlink()
    (tmp_path / IMAGES / "000000002.png").write_bytes(b"no record")
    own = {"notes.txt", "000000009.png", "000000001-holiday.png", "000000001.doc"}
    for name in own:
        (tmp_path / IMAGES / name).write_text("of the user")
    again = Storage(tmp_path, 10**6)
    assert [each.file for each in again.last(9)] == [names[2], names[1]]
    left = {names[1], names[2], "000000002.png", *own}
    assert {path.name for path in (tmp_path / IMAGES).iterdir()} == left
    with pytest.raises(CandidError, match="another process uses it"):
        Storage(tmp_path, 10**6)
    again.close()


def test_numbers_never_repeat_after_records_were_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of a folder in use, without the write-ahead log; a power cut can lose the same records."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    storage = Storage(first, 1000)
    names = [storage.add(b"BM" + bytes([i]) * 98, "novel", '{"label": "cat"}', "mine") for i in range(6)]
    storage.correct([5], "dog")
    shutil.copytree(first, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    storage.close()
    contents = {name: (copy / IMAGES / str(name)).read_bytes() for name in names}
    for added in range(2):  # a start in between deletes nothing, either
        again = Storage(copy, 1000)
        assert again.add(b"BM" + bytes(98), "accept", "{}") == f"{7 + added:09d}.bmp"
        assert {name: (copy / IMAGES / str(name)).read_bytes() for name in names} == contents
        assert [each.file for each in again.corrections()] == [names[4]]
        again.close()
    assert "6 images" in caplog.text
    again = Storage(copy, 1000)
    for _ in range(6):
        again.add(b"BM" + bytes(98), "accept", "{}")
    left = sorted(path.name for path in (copy / IMAGES).iterdir())
    assert left == [names[4], *(f"{i:09d}.bmp" for i in range(6, 15) if i != 5)]
    again.close()


def test_a_folder_with_images_of_the_user_is_refused(tmp_path: Path) -> None:
    own = tmp_path / IMAGES / "20250101.jpg"
    own.parent.mkdir()
    own.write_text("of the user")
    with pytest.raises(CandidError, match="no server stored"):
        Storage(tmp_path, 10**6)
    assert own.read_text() == "of the user" and not (tmp_path / RECORDS).exists()


def test_a_full_disk_does_not_stop_the_answers(tmp_path: Path) -> None:
    script = """
import logging, resource, sys
from pathlib import Path
from candid.judging.store import Storage

logging.basicConfig(stream=sys.stdout, format="%(message)s")
storage = Storage(Path(sys.argv[1]), 10**9)
assert storage.add(b"BM" + bytes(100), "accept", "{}")
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
print([storage.add(b"BM" + bytes(60_000), "accept", "{}") for _ in range(3)])
print(storage.add(b"BM", "accept", "{}"), len(storage.last(9)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "free some space" in lines[0]
    assert lines[1:] == ["[None, None, None]", "000000002.bmp 2"]


def test_a_killed_server_loses_no_verdict_and_the_commands_start_from_its_folder(
    saved: str, tmp_path: Path
) -> None:
    options = ["--port", "0", "--workers", "0", "--store", str(tmp_path), "--state", str(tmp_path / "state")]
    command = [sys.executable, "-m", "candid", "serve", saved, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split(" at ")[1].split(";")[0]
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            for i in range(5):
                client.post("/v1/examine", files=[("file", (f"{i}.png", picture(i)))])
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    records = sqlite3.connect(tmp_path / RECORDS)
    assert records.execute("SELECT count(*) FROM verdicts").fetchone() == (5,)
    records.close()
    done = candid_command("watch", saved, tmp_path / IMAGES, "--once", "--json")
    assert json.loads(done.stdout)["images"] == 5
