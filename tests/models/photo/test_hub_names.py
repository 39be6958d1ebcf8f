"""Names ``hf:OWNER/NAME``: a server on this machine that speaks what is needed of the Hub's API."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from candid import CandidError
from candid.models.photo.hub import fetched
from tests.models.photo.test_hub import KINDS, hub_folder
from tests.photo_models import CLASSES, write_photos

pytest.importorskip("huggingface_hub")
COMMIT, OTHER = "a1" * 20, "b2" * 20


class Hub(NamedTuple):
    """A server, its folder of repositories, and the paths that it was asked for."""

    address: str
    folder: Path
    asked: list[str]
    home: Path
    """An empty cache."""

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command of candid that knows only this server."""
        variables = os.environ | {"HF_ENDPOINT": self.address, "HF_HOME": str(self.home), **environment}
        line = [sys.executable, "-m", "candid", *command]
        return subprocess.run(line, capture_output=True, text=True, env=variables)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    asked: list[str] = []
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

        def _repository(self, name: str, revision: str) -> None:
            if name.startswith("gated/"):
                siblings = [{"rfilename": "model.onnx"}]
                self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            elif not (folder / name).is_dir():
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                files = [
                    each.relative_to(folder / name) for each in (folder / name).rglob("*") if each.is_file()
                ]
                siblings = [{"rfilename": each.as_posix()} for each in files]
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
            if self.command == "GET":
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
    assert {"name", "size", "licence", "speed", "install"} == set(rows[0])
    assert any(row["name"] == "hf:onnx-community/dinov2-small" for row in rows)


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CandidError, match=r"pip install 'candid-vision\[hub\]'"):
        fetched("hf:some/clip")
