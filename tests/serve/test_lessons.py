"""Correct photos, teach them, serve the new model and go back: over the API, with a real photo model."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from candid._support.errors import CandidError
from candid.cli.app import run as command
from candid.judging.store import CORRECTIONS, IMAGES, Storage, corrections_in
from candid.models import checkpoint
from candid.serve import ServeOptions
from candid.serve.lessons import FOLDER, learn, learned_by
from candid.serve.sensor import Sensor
from candid.serve.served import Models
from candid.serve.service import Service
from tests.photo_models import PhotoRun, photo
from tests.serve.helpers import Running, picture, running, until

CHECKS = range(60, 72)


def encoded(kind: str, seed: int) -> bytes:
    file = BytesIO()
    photo(kind, seed).save(file, "PNG")
    return file.getvalue()


@contextmanager
def keeping(trained: Service, shapes: PhotoRun, folder: Path) -> Iterator[Running]:
    with running(trained, sensor=Sensor.of(ServeOptions(store=folder)), source=shapes.model) as server:
        yield server


def send_checks(server: Running) -> None:
    """Send twelve photos of a kind that the model does not know."""
    for start in (0, 6):
        server.examine(*(encoded("checks", seed) for seed in CHECKS[start : start + 6]))


@pytest.fixture
def taught(shapes: PhotoRun, trained: Service, tmp_path: Path) -> Iterator[Running]:
    with keeping(trained, shapes, tmp_path) as server:
        send_checks(server)
        yield server


def lessons(server: Running, path: str = "", **fields: Any) -> Any:
    """Ask, and wait until the server is done."""
    answer = server.client.post(f"/v1/{path}", data=fields) if path else server.client.get("/v1/lessons")
    assert answer.status_code == 200, answer.text
    until(lambda: server.client.get("/v1/lessons").json()["busy"] is None)
    found = server.client.get("/v1/lessons").json()
    assert found["problem"] is None
    return found


def test_a_class_is_corrected_taught_served_and_taken_back(taught: Running, trained: Service) -> None:
    probe = encoded("checks", 90)
    before = taught.examine(probe).json()
    assert (before["version"], before["stored"]) == (0, [13])
    assert taught.client.post("/v1/corrections", data={"ids": [1, 2, 3], "name": "checks"}).status_code == 200
    found = lessons(taught)
    assert found["few"] == {"checks": 2} and found["waiting"] == 3 and found["cannot"] is None
    taught.client.post("/v1/lessons")
    until(lambda: taught.client.get("/v1/lessons").json()["busy"] is None)
    assert "needs 2 more" in taught.client.get("/v1/lessons").json()["problem"]

    lessons(taught, "corrections", ids=[*range(1, 13)], name=" checks ")
    found = lessons(taught, "lessons")
    (lesson,) = found["lessons"]
    assert lesson["photos"] == {"checks": 12} and lesson["classes"] == ["checks"] and not lesson["in_use"]
    assert {each["class"] for each in lesson["recalls"]} == set(trained.classes)
    assert any("the price" in sentence for sentence in lesson["sentences"])
    assert taught.examine(probe).json()["version"] == 0  # nothing changes before it is used
    found = lessons(taught, "lessons/use", version=1)
    assert found["version"] == 1 and found["waiting"] == 0 and found["lessons"][0]["in_use"]
    after = taught.examine(probe).json()
    assert after["version"] == 1 and after["results"][0]["label"] == "checks"
    (model,) = taught.client.get("/v1/models").json()["models"]
    assert model["classes"] == [*trained.classes, "checks"] and model["version"] == 1

    assert lessons(taught, "lessons/use", version=0)["waiting"] == 12
    again = taught.examine(probe).json()["results"]
    assert again[0]["posterior"] == pytest.approx(before["results"][0]["posterior"], abs=1e-6)
    assert lessons(taught, "corrections", ids=[1], name="")["waiting"] == 11  # taken back
    assert taught.client.post("/v1/lessons/use", data={"version": 7}).status_code == 404
    assert taught.client.post("/v1/corrections", data={"ids": [99], "name": "a"}).status_code == 404
    assert taught.client.post("/v1/corrections", data={"ids": [1], "name": "a\nb"}).status_code == 422


def test_a_server_goes_on_with_what_it_was_taught_and_the_command_teaches_from_its_folder(
    trained: Service, shapes: PhotoRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "by command"
    with keeping(trained, shapes, tmp_path) as server:
        send_checks(server)
        lessons(server, "corrections", ids=[*range(1, 8)], name="checks")
        lessons(server, "lessons")
        lessons(server, "lessons")  # an unused one is replaced
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["00002"]
        lessons(server, "lessons/use", version=2)
        assert command(["teach", shapes.model, "--from-store", str(tmp_path), "--out", str(out)]) is None
    made = checkpoint.load(out)
    assert made.class_names == (*trained.classes, "checks") and len(learned_by(made)) == 7
    assert "7 corrections taught" in capsys.readouterr().out
    with keeping(trained, shapes, tmp_path) as server:
        until(lambda: server.client.get("/v1/models").json()["models"][0]["version"] == 2)
        assert lessons(server)["waiting"] == 0
    with pytest.raises(CandidError, match="No correction can be taught"):
        command(["teach", str(out), "--from-store", str(tmp_path), "--out", str(tmp_path / "again")])


def test_novel_images_are_grouped_to_be_named(taught: Running) -> None:
    taught.examine(*(encoded("noise", seed) for seed in range(8)))
    novel = lessons(taught)["novel"]
    found = lessons(taught, "groups")
    assert novel >= 5 and sum(len(each["ids"]) for each in found["groups"]) >= 5
    first = found["groups"][0]
    found = lessons(taught, "corrections", ids=first["ids"], name="noise")
    assert found["novel"] == novel - len(first["ids"])
    assert all(first["ids"][0] not in each["ids"] for each in found["groups"])


def test_one_job_at_a_time(taught: Running) -> None:
    lessons(taught, "corrections", ids=[*range(1, 8)], name="checks")
    assert taught.client.post("/v1/lessons").json()["busy"] == "teaching"
    for path in ("lessons", "groups"):
        answer = taught.client.post(f"/v1/{path}")
        assert answer.status_code == 409 and "ask again" in answer.json()["error"]
    lessons(taught)


def test_requests_during_a_switch_get_whole_answers_of_one_model(taught: Running) -> None:
    """A small one of ``python -m experiments.red`` (switch-of-models)."""
    lessons(taught, "corrections", ids=[*range(1, 13)], name="checks")
    lessons(taught, "lessons")
    files = [encoded("checks", 90), encoded("dots", 91)]
    right = [taught.examine(*files).json()]
    answers: list[Any] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(taught.examine(*files))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in (1, 0, 1):
        lessons(taught, "lessons/use", version=version)
    done.set()
    for thread in threads:
        thread.join()
    right.append(taught.examine(*files).json())
    assert {each.status_code for each in answers} == {200}
    found = [each.json() for each in answers]
    assert {each["version"] for each in found} == {0, 1}
    for each in found:
        for result, expected in zip(each["results"], right[each["version"]]["results"], strict=True):
            assert result["posterior"] == pytest.approx(expected["posterior"], abs=1e-4)
            assert result["label"] == expected["label"]


def test_a_model_that_cant_be_taught_says_so(service: Service, tmp_path: Path) -> None:
    with running(service, sensor=Sensor.of(ServeOptions(store=tmp_path))) as server:
        server.examine(picture(1))
        found = lessons(server, "corrections", ids=[1], name="a bird")
        assert "Only photo models" in found["cannot"] and found["waiting"] == 1
        answer = server.client.post("/v1/lessons")
        assert answer.status_code == 422 and "Only photo models" in answer.json()["error"]


def test_several_models_are_asked_by_name(service: Service, trained: Service) -> None:
    with running(service, others=[trained]) as server:
        names = [each["name"] for each in server.client.get("/v1/models").json()["models"]]
        assert names == ["small", "shapes"]
        for name, classes in (("small", service.classes), ("shapes", trained.classes)):
            files = {"file": encoded("dots", 3)}
            answer = server.client.post(f"/v1/examine?model={name}", files=files).json()
            assert answer["model"] == name and answer["results"][0]["label"] in classes
        wrong = server.client.post("/v1/examine?model=other", files={"file": b""})
        assert wrong.status_code == 404 and "no such model" in wrong.json()["error"]
        drift = [server.client.get(f"/v1/drift?model={name}").json()["images"] for name in names]
        assert drift == [1, 1] and server.metric("candid_drift_images") == 1


def test_corrected_images_are_never_removed(tmp_path: Path) -> None:
    storage = Storage(tmp_path, 1000)
    for i in range(5):
        storage.add(b"\x89PNG" + bytes([i]) * 96, "novel", '{"label": "cat"}', "mine")
    assert storage.correct([2, 4, 99], "dog") == 2
    for i in range(30):
        storage.add(b"BM" + bytes([i]) * 98, "accept", "{}", "mine")
    kept = sorted(path.name for path in (tmp_path / IMAGES).iterdir())
    assert kept[:2] == ["000000002.png", "000000004.png"] and len(kept) == 10
    assert storage.novel("mine", 9) == [] and storage.novel("other", 9) == []
    storage.close()
    found = corrections_in(tmp_path)
    assert [(each.id, each.name, each.said, each.model) for each in found] == [
        (2, "dog", "cat", "mine"),
        (4, "dog", "cat", "mine"),
    ]
    (tmp_path / IMAGES / kept[0]).unlink()
    again = Storage(tmp_path, 1000)
    assert [each.id for each in again.corrections("mine")] == [4] and again.corrections("other") == []
    assert again.correct([4], None) == 1 and json.loads((tmp_path / CORRECTIONS).read_text()) == []
    again.close()
    (tmp_path / CORRECTIONS).write_text("{")
    with pytest.raises(CandidError, match="can't be read"):
        Storage(tmp_path, 1000)


def test_all_models_go_on_with_what_they_were_taught(
    trained: Service, shapes: PhotoRun, tmp_path: Path
) -> None:
    again = Service.load(shapes.model, "again")

    def both() -> AbstractContextManager[Running]:
        sensor = Sensor.of(ServeOptions(store=tmp_path))
        return running(trained, others=[again], sensor=sensor, source=shapes.model)

    def versions(server: Running) -> list[int]:
        return [each["version"] for each in server.client.get("/v1/models").json()["models"]]

    with both() as server:
        for i, name in enumerate(("shapes", "again")):
            files = [("file", ("a.png", encoded("checks", seed))) for seed in CHECKS[:6]]
            assert server.client.post(f"/v1/examine?model={name}", files=files).status_code == 200
            lessons(server, "corrections", ids=[*range(1 + 6 * i, 7 + 6 * i)], name=f"checks of {name}")
            lessons(server, f"lessons?model={name}")
            lessons(server, f"lessons/use?model={name}", version=i + 1)
        assert versions(server) == [1, 2]
    with both() as server:
        until(lambda: versions(server) == [1, 2])
        assert lessons(server)["busy"] is None
    for name in ("shapes", "again"):
        out = tmp_path / name
        shutil.copytree(shapes.model, out)
        command(["teach", str(out), "--from-store", str(tmp_path)])
        assert checkpoint.load(out).class_names[-1] == f"checks of {name}"
    with pytest.raises(CandidError, match="corrections of models named again and shapes: give the model"):
        command(["teach", shapes.model, "--from-store", str(tmp_path), "--out", str(tmp_path / "out")])


def test_a_model_comes_back_after_its_last_request(
    trained: Service, shapes: PhotoRun, tmp_path: Path
) -> None:
    """The state of its watch is open only once."""
    sensor = Sensor.of(ServeOptions(store=tmp_path / "store", state=tmp_path / "state"))
    with running(trained, sensor=sensor, source=shapes.model) as server:
        send_checks(server)
        lessons(server, "corrections", ids=[*range(1, 8)], name="checks")
        lessons(server, "lessons")
        models = server.guard.backend
        assert isinstance(models, Models)
        with models.first.used():
            lessons(server, "lessons/use", version=1)
            assert server.client.post("/v1/lessons/use", data={"version": 0}).json()["busy"] == "loading"
            time.sleep(0.3)
            waiting = server.client.get("/v1/lessons").json()
            assert (waiting["busy"], waiting["version"], waiting["problem"]) == ("loading", 1, None)
        assert lessons(server)["version"] == 0
        until(lambda: not models.starts["shapes"].networks)  # its weights are not in memory twice
        assert server.client.get("/v1/drift").json()["images"] == 12


def test_a_correction_that_was_changed_after_it_was_taught_is_not_taught_twice(
    shapes: PhotoRun, tmp_path: Path
) -> None:
    storage, out = Storage(tmp_path, 10**9), str(tmp_path / "out")
    for seed in CHECKS[:6]:
        storage.add(encoded("checks", seed), "novel", "{}", "mine")
    storage.correct(range(1, 7), "checks")
    learn(shapes.model, tmp_path, storage.corrections(), out)
    storage.correct([1], "dots")
    with pytest.raises(CandidError, match="1 of them was changed after it had been taught"):
        learn(out, tmp_path, storage.corrections(), out)
    storage.close()


def test_a_correction_of_a_training_photo_to_its_own_class_fails_no_lesson(
    shapes: PhotoRun, tmp_path: Path
) -> None:
    storage, out = Storage(tmp_path, 10**9), str(tmp_path / "out")
    known = next(Path(shapes.data, "train", "dots").iterdir())
    storage.add(known.read_bytes(), "ambiguous", "{}", "mine")
    storage.correct([1], "dots")
    with pytest.raises(CandidError, match="there is nothing to add"):
        learn(shapes.model, tmp_path, storage.corrections(), out)
    for seed in CHECKS[:6]:
        storage.add(encoded("checks", seed), "novel", "{}", "mine")
    storage.correct(range(2, 8), "checks")
    lesson = learn(shapes.model, tmp_path, storage.corrections(), out)
    assert lesson.photos == {"checks": 6} and lesson.classes == ["checks"]
    learned = learned_by(checkpoint.resolve(out))
    assert not [each for each in storage.corrections() if each.digest not in learned]  # none waits any more
    storage.close()


def test_a_stored_image_is_shown_as_the_model_that_judged_it_sees_it(
    service: Service, trained: Service, tmp_path: Path
) -> None:
    sensor = Sensor.of(ServeOptions(store=tmp_path))
    with running(service, sensor=sensor, others=[trained]) as server:
        sent = {"file": encoded("dots", 3)}
        assert server.client.post("/v1/examine?model=shapes", files=sent).status_code == 200
        seen = server.client.get("/v1/verdicts/image", params={"id": 1})
    _, height, width = trained.description.info.image_shape
    assert Image.open(BytesIO(seen.content)).size == (width, height)
