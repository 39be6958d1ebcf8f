"""Eyes and models ``hf:OWNER/NAME``: a server on this machine that speaks what is needed of the Hub's API."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from candid import CandidError
from candid.models import zoo
from candid.models.hub import fetched
from candid.models.photo.efficientnet import weights_file
from candid.models.photo.eyes import EYES
from tests.models.photo.test_hub import KINDS, hub_folder
from tests.photo_models import CLASSES, write_photos

pytest.importorskip("huggingface_hub")
yaml = pytest.importorskip("yaml")
COMMIT, OTHER, TOKEN = "a1" * 20, "b2" * 20, "hf_for_a_test"


class Hub(NamedTuple):
    """A server, its folder of repositories, and the paths that it was asked for."""

    address: str
    folder: Path
    asked: list[str]
    home: Path
    """An empty cache."""

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of candid that knows only this server."""
        ours = {"HF_ENDPOINT": self.address, "HF_HOME": str(self.home), "HF_TOKEN": "", **environment}
        ours["HF_HUB_DISABLE_XET"] = "1"  # a protocol of its own, which this server does not speak
        variables = os.environ | ours
        line = [sys.executable, "-m", "candid", *command]
        return subprocess.run(line, capture_output=True, text=True, env=variables)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    asked: list[str] = []
    blobs: dict[str, bytes] = {}
    folder = tmp_path / "repositories"
    hub_folder(folder / "some" / "clip", KINDS["clip"])
    (folder / "some" / "clip" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A card\n")
    hub_folder(folder / "some" / "research", KINDS["siglip"])
    card = "---\nlicense: other\nlicense_name: apple-amlr\n---\n"
    (folder / "some" / "research" / "README.md").write_text(card)
    (folder / "some" / "empty").mkdir()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._repository("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
            elif "resolve" in parts:
                self._file(folder / parts[0] / parts[1] / "/".join(parts[4:]), parts[0])
            else:
                self._send(404, b"")

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self) -> None:
            asked.append(self.path)
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if not known and "validate-yaml" not in self.path:
                self._send(401, b"{}", {"X-Error-Message": "Invalid username or password."})
            elif self.path == "/api/repos/create":
                given = json.loads(content)
                made = folder / given["organization"] / given["name"]
                made.mkdir(parents=True, exist_ok=True)
                self._json({"url": f"{self._here()}/{given['organization']}/{given['name']}"})
            elif "/preupload/" in self.path:
                sizes = {each["path"]: each["size"] for each in json.loads(content)["files"]}
                modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in sizes}
                files = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
                self._json({"files": files})
            elif self.path.endswith("/objects/batch"):
                objects = json.loads(content)["objects"]
                for each in objects:
                    each["actions"] = {"upload": {"href": f"{self._here()}/blobs/{each['oid']}"}}
                self._json({"transfer": "basic", "objects": objects})
            elif "/commit/" in self.path:
                self._commit(folder / "/".join(self.path.split("/")[3:5]), content)
            else:
                self._json({})

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            blobs[self.path.rpartition("/")[2]] = content
            self._send(200, b"")

        def _commit(self, made: Path, content: bytes) -> None:
            for line in content.decode().splitlines():
                value = (entry := json.loads(line))["value"]
                if entry["key"] == "file":
                    (made / value["path"]).write_bytes(base64.b64decode(value["content"]))
                elif entry["key"] == "lfsFile":
                    (made / value["path"]).write_bytes(blobs[value["oid"]])
                elif entry["key"] == "deletedFile":
                    (made / value["path"]).unlink()
            name = f"{made.parent.name}/{made.name}"
            self._json({"commitUrl": f"{self._here()}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

        def _here(self) -> str:
            return f"http://{self.headers['Host']}"

        def _json(self, answer: object) -> None:
            self._send(200, json.dumps(answer).encode())

        def _repository(self, name: str, revision: str) -> None:
            if name.startswith("gated/"):
                siblings = [{"rfilename": file, "size": 1} for file in ("model.json", "model.onnx")]
                self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            elif not (folder / name).is_dir():
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                files = [
                    each.relative_to(folder / name) for each in (folder / name).rglob("*") if each.is_file()
                ]
                sizes = {each.as_posix(): (folder / name / each).stat().st_size for each in files}
                siblings = [{"rfilename": path, "size": size} for path, size in sizes.items()]
                self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

        def _file(self, file: Path, owner: str) -> None:
            if owner == "gated":
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                content = file.read_bytes()
                etag = hashlib.sha256(content).hexdigest()
                self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(code)
            for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", folder, asked, tmp_path / "home")
    server.shutdown()
    server.server_close()


def test_a_model_through_an_eye_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Trained with a download, pinned to commit and digest, used without network."""
    data = write_photos(tmp_path / "photos", CLASSES, 6)
    out, image = str(tmp_path / "run"), str(next(data.rglob("*.png")))
    train = "train", str(data), "--eye", "hf:some/clip", "--out", out
    refused = hub.run(*train, HF_HUB_OFFLINE="1")
    assert refused.returncode != 0 and not hub.asked
    assert "'hf:some/clip' is not in the cache of the Hub, and HF_HUB_OFFLINE is set." in refused.stderr
    trained = hub.run(*train)
    assert trained.returncode == 0, trained.stderr
    assert "apache-2.0" in trained.stderr + trained.stdout
    eye = f"hf:some/clip@{COMMIT}:onnx/model.onnx"
    config = json.loads(next(Path(out).rglob("model.json")).read_text())["config"]
    assert config["eye"] == eye and len(config["eye_sha256"]) == 64
    assert any(path.endswith("model.onnx_data") for path in hub.asked)
    hub.asked.clear()
    used = hub.run("examine", out, image, "--json")
    assert used.returncode == 0, used.stderr
    assert not hub.asked  # nothing is downloaded when a model is used
    again = hub.run("eyes", "hf:some/clip", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(again.stdout)["name"] == eye
    assert json.loads(again.stdout)["sha256"] == config["eye_sha256"]
    elsewhere = hub.run("examine", out, image, HF_HOME=str(tmp_path / "elsewhere"))
    assert f"get it with 'candid eyes {eye}'" in " ".join(elsewhere.stderr.split())
    assert not hub.asked
    (graph,) = hub.home.rglob("snapshots/*/preprocessor_config.json")
    changed = json.loads(graph.read_text()) | {"resample": 3}
    graph.unlink()
    graph.write_text(json.dumps(changed))
    assert "other weights" in hub.run("examine", out, image).stderr


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    """What a command said on standard error, as one line."""
    return " ".join(done.stderr.split())


def test_a_model_goes_to_the_hub_and_comes_back(hub: Hub, tmp_path: Path) -> None:
    """Shown first, uploaded then; downloaded once, used without network, bound to its digests."""
    photo = str(next(write_photos(tmp_path / "photos", CLASSES[:1], 1).rglob("*.png")))
    planned = hub.run("push", "waste", "hf:me/waste")
    assert planned.returncode == 0 and not hub.asked, planned.stderr
    assert "Nothing was uploaded" in planned.stdout and "small photos of its training" in planned.stdout
    old = hub.folder / "me" / "waste" / f"weights-{'0' * 16}.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an earlier model")
    pushed = hub.run("push", "waste", "hf:me/waste", "--yes", "--json", HF_TOKEN=TOKEN)
    assert pushed.returncode == 0, pushed.stderr
    result = json.loads(pushed.stdout)
    there = {path.name: path.read_bytes() for path in old.parent.iterdir()}
    assert result["name"] == f"hf:me/waste@{COMMIT}" and result["licence"] == "mit"
    assert {name: len(content) for name, content in there.items()} == result["files"]
    ours = {path.name: path.read_bytes() for path in zoo.MODELS["waste"].iterdir() if path.name in there}
    assert there == ours and there.keys() > {"model.json", "README.md"}

    hub.asked.clear()
    refused = hub.run("examine", "hf:me/waste", photo, HF_HUB_OFFLINE="1")
    assert "'hf:me/waste' is not in the cache of the Hub, and HF_HUB_OFFLINE is set" in said_by(refused)
    first = hub.run("examine", "hf:me/waste", photo, "--json")
    assert first.returncode == 0, first.stderr
    assert "downloading me/waste from the Hub: 5 files, 3.1 MB" in said_by(first)
    assert f"hf:me/waste@{COMMIT} always means this commit; its licence: mit" in said_by(first)
    hub.asked.clear()
    for name in ("hf:me/waste", f"hf:me/waste@{COMMIT}"):
        again = hub.run("examine", name, photo, "--json")
        assert (again.stdout, "downloading" in again.stderr, hub.asked) == (first.stdout, False, [])
    assert first.stdout == hub.run("examine", "waste", photo, "--json").stdout
    shown = hub.run("models", "hf:me/waste", "--json")
    assert json.loads(shown.stdout)["name"] == f"hf:me/waste@{COMMIT}" and hub.asked
    assert "downloading" not in shown.stderr
    changed = hub.run("rename", "hf:me/waste", "glass=bottles")
    assert "'hf:me/waste' is on the Hub and stays as it is" in said_by(changed)
    (weights,) = hub.home.rglob("snapshots/*/weights-*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    damaged = hub.run("examine", "hf:me/waste", photo)
    assert damaged.returncode == 2 and "was changed since it was saved" in said_by(damaged)


def test_a_cache_made_elsewhere_is_enough(hub: Hub, tmp_path: Path) -> None:
    """A folder laid out as the Hub's cache, copied to a machine without network, serves every command."""
    cache = hub.home / "hub" / "models--me--waste"
    shutil.copytree(zoo.MODELS["waste"], cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    data = write_photos(tmp_path / "photos", CLASSES[:1], 2)
    (data / CLASSES[0]).rename(data / "glass")
    out = str(tmp_path / "out")
    for command in (
        ("info", "hf:me/waste"),
        ("evaluate", f"hf:me/waste@{COMMIT}", str(data), "--out", out),
        ("models", "hf:me/waste"),
    ):
        done = hub.run(*command, HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
    assert not hub.asked
    assert f"hf:me/waste@{COMMIT}, licence: mit" in said_by(done)


@pytest.mark.slow
def test_a_model_takes_its_eye_along(hub: Hub, tmp_path: Path) -> None:
    """The file of an eye, its weights and settings; without its folder, the model still works elsewhere."""
    data = write_photos(tmp_path / "photos", CLASSES, 6)
    graph = hub_folder(tmp_path / "eye", KINDS["clip"])
    image, run = str(next(data.rglob("*.png"))), str(tmp_path / "run")
    assert hub.run("train", str(data), "--eye", str(graph), "--out", run).returncode == 0
    expected = hub.run("examine", run, image, "--json")
    pushed = hub.run("push", run, "hf:me/own", "--licence", "apache-2.0", "--yes", "--json", HF_TOKEN=TOKEN)
    assert pushed.returncode == 0, pushed.stderr
    result = json.loads(pushed.stdout)
    wanted = {"model.onnx", "model.onnx_data", "preprocessor_config.json", "config.json", "README.md"}
    assert wanted < result["files"].keys()
    card = yaml.safe_load(result["card"].split("---")[1])
    assert card["license"] == "apache-2.0" and card["library_name"] == "candid-vision"
    assert card["pipeline_tag"] == "image-classification"
    (metric,) = card["model-index"][0]["results"][0]["metrics"]
    assert metric["type"] == "accuracy" and 0 <= metric["value"] <= 1
    graph.unlink()
    found = hub.run("examine", "hf:me/own", image, "--json")
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "models hf:some/nothing",
            "There is no repository 'some/nothing' on the Hub, or it is private",
        ),
        ("models hf:gated/model", "'gated/model' is gated: accept its licence"),
        (f"models hf:me/waste@{OTHER}", f"'me/waste' has no revision '{OTHER}'"),
        ("models hf:some/clip", "'some/clip' has no model.json, so it is no model of candid"),
        (
            "models hf:waste",
            "'hf:waste' is no name of a model on the Hub: write hf:OWNER/NAME[@REVISION]",
        ),
        ("push waste hf:me/waste --yes", "log in with 'hf auth login', or set HF_TOKEN"),
        ("push waste hf:me/waste@main", "is no repository to upload to: write hf:OWNER/NAME"),
        ("push wast hf:me/waste", "There is no model at 'wast'"),
        ("push waste hf:me/waste --licence mit", "README.md' states a licence: change it there"),
    ],
)
def test_what_is_wrong_with_a_model_of_the_hub_is_one_sentence(command: str, message: str, hub: Hub) -> None:
    (hub.folder / "me" / "waste").mkdir(parents=True)
    (hub.folder / "gated" / "model").mkdir(parents=True)
    done = hub.run(*command.split())
    assert done.returncode == 2 and message in said_by(done)
    assert "Traceback" not in said_by(done) and said_by(done).count(". ") == 0


def test_a_wrong_token_and_no_network_are_one_sentence(hub: Hub) -> None:
    wrong = hub.run("push", "waste", "hf:me/waste", "--yes", HF_TOKEN="hf_wrong")
    assert "'hf auth login'" in said_by(wrong) or "whether your token may write there" in said_by(wrong)
    nowhere = hub.run("models", "hf:me/waste", HF_ENDPOINT="http://127.0.0.1:9")
    assert "'me/waste' can't be downloaded from the Hub (ConnectError): check the network" in said_by(nowhere)
    for done in (wrong, nowhere):
        assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:some/nothing", "There is no repository 'some/nothing' on the Hub, or it is private"),
        ("hf:gated/dinov3", "'gated/dinov3' is gated: accept its licence"),
        (f"hf:some/clip@{OTHER}", f"'some/clip' has no revision '{OTHER}'"),
        ("hf:some/clip:onnx/other.onnx", "has no onnx/other.onnx; its ONNX files: onnx/model.onnx"),
        ("hf:some/empty", "its ONNX files: none"),
        ("hf:clip", "is no name of the Hub"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(name: str, message: str, hub: Hub) -> None:
    done = hub.run("eyes", name)
    said = " ".join(done.stderr.split())
    assert done.returncode != 0 and message in said
    assert "Traceback" not in said and said.count(". ") == 0


def test_no_network_is_one_sentence(hub: Hub) -> None:
    done = hub.run("eyes", "hf:some/clip", HF_ENDPOINT="http://127.0.0.1:9")
    said = " ".join(done.stderr.split())
    assert "'some/clip' can't be downloaded from the Hub (ConnectError): check the network" in said
    assert "Traceback" not in said


def test_a_licence_that_is_not_free_is_named(hub: Hub) -> None:
    done = hub.run("eyes", "hf:some/research", "--json")
    assert json.loads(done.stdout)["licence"] == "apple-amlr: not known to be free, read its card"


def test_eyes_are_listed() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "candid", "eyes", "--json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(listed.stdout)
    assert [row["name"] for row in rows][:3] == ["lite0", "lite1", "lite2"]
    assert {"name", "size", "MB", "licence", "speed", "install"} == set(rows[0])
    assert [row["MB"] for row in rows[:3]] == [
        round(weights_file(eye).stat().st_size / 1e6) for eye in EYES.values()
    ]
    assert any(row["name"] == "hf:onnx-community/dinov2-small" for row in rows)


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CandidError, match=r"pip install 'candid-vision\[hub\]'"):
        fetched("hf:some/clip")
