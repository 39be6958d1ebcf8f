"""The Dockerfile, the manifests and the workflow say what the package does: names, ports, commands."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import candid
from candid.cli.app import COMMANDS
from experiments import container

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")  # schemathesis and captum bring it


def read(path: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / path).read_text(encoding="utf-8")))


def test_the_steps_of_the_dockerfile_are_known_and_copy_what_exists() -> None:
    steps = container.steps()
    assert {name for name, _ in steps} <= container.READ | {"COPY", "RUN", "ENTRYPOINT", "CMD", "HEALTHCHECK"}
    copied = [name for step, text in steps if step == "COPY" for name in text.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)
    command = [word for step, text in steps if step in ("ENTRYPOINT", "CMD") for word in json.loads(text)]
    assert command[0] == "candid" and command[1] in COMMANDS
    port = command[command.index("--port") + 1]
    assert ("EXPOSE", port) in steps and ("USER", "candid") in steps
    assert any(step == "HEALTHCHECK" and f":{port}/healthz" in text for step, text in steps)


def test_the_manifests_agree_with_the_dockerfile() -> None:
    (compose,), (deployment, service) = read("deploy/compose.yaml"), read("deploy/kubernetes.yaml")
    (pod,) = deployment["spec"]["template"]["spec"]["containers"]
    (cmd,) = [json.loads(text) for step, text in container.steps() if step == "CMD"]
    assert pod["args"] == cmd
    port = int(cmd[cmd.index("--port") + 1])
    assert pod["ports"][0]["containerPort"] == service["spec"]["ports"][0]["targetPort"] == port
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    server = compose["services"]["candid"]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"] and "CANDID_TOKEN" in server["environment"]
    assert {name.split(":")[0] for name in server["volumes"]} == {"./models", *compose["volumes"]}


def test_the_workflow_calls_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (workflow,) = read(".github/workflows/tests.yml")
    runs = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert runs == ["make test", "make docs"] and {run.split()[1] for run in runs} <= set(targets)
    for path in (
        ".pre-commit-config.yaml",
        *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("wrong", "wish")),
    ):
        assert read(path)


DEPLOY = ROOT / "examples/deploy"
SAMPLES = ROOT / "candid/reports/demo/samples"


@pytest.mark.filterwarnings("ignore")  # of MLflow
def test_a_model_in_mlflow_answers_as_candid_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real package, where it is installed; nothing of the stored model is pickled."""
    mlflow, pandas = pytest.importorskip("mlflow"), pytest.importorskip("pandas")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    photos = sorted(SAMPLES.glob("*/*.jpg"))[::5]
    logged = runpy.run_path(str(DEPLOY / "mlflow_model.py"))["log_model"]("waste")
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt")]
    loaded, expected = mlflow.pyfunc.load_model(logged.model_uri), candid.examine("waste", photos)
    for images in ([str(photo) for photo in photos], [photo.read_bytes() for photo in photos]):
        table = loaded.predict(pandas.DataFrame({"image": images}))
        assert list(table["verdict"]) == [examined.verdict for examined in expected]
        assert list(table["p_value"]) == [examined.p_value for examined in expected]


def test_unknown_photos_go_to_label_studio_and_come_back(tmp_path: Path) -> None:
    """Tasks of a table of groups; what people answer becomes the photos of each class."""
    script = runpy.run_path(str(DEPLOY / "label_studio.py"))
    hats, cat = sorted((SAMPLES / "hats").glob("*.jpg")), SAMPLES / "everyday" / "cat.jpg"
    result = candid.group("waste", [*hats, cat], groups=1)
    (tmp_path / "groups.csv").write_text(result.csv(), encoding="utf-8")
    tasks = script["tasks"](tmp_path / "groups.csv")
    novel = {str(Path(each.path).resolve()) for each in result.examinations if each.verdict == "novel"}
    assert {task["data"]["path"] for task in tasks} == novel and len(novel) > 5
    assert all(task["predictions"][0]["result"][0]["value"] == {"text": ["unknown 1"]} for task in tasks)
    answer = tasks[0]["predictions"][0]["result"][0]
    exported = [
        {"data": task["data"], "annotations": [{"result": [answer | {"value": {"text": [f" {name} "]}}]}]}
        for task, name in zip(tasks, ["hat"] * (len(tasks) - 1) + ["cat"], strict=True)
    ]
    exported[0]["annotations"][0]["was_cancelled"] = True
    (tmp_path / "export.json").write_text(json.dumps(exported), encoding="utf-8")
    lessons = script["lessons"](tmp_path / "export.json")
    assert {name: len(paths) for name, paths in lessons.items()} == {"hat": len(tasks) - 2, "cat": 1}
    taught = candid.teach("waste", {"hat": lessons["hat"]}).model
    assert taught.class_names[-1] == "hat"


def test_tasks_are_what_label_studio_takes() -> None:
    """With the SDK of Label Studio, where it is installed."""
    sdk = pytest.importorskip("label_studio_sdk.label_interface")
    script = runpy.run_path(str(DEPLOY / "label_studio.py"))
    task = script["task"]({"path": "photos/a.jpg", "group": "unknown 1", "nearest_class": "glass"})
    interface = sdk.LabelInterface(script["LABELS"])
    assert interface.validate_prediction(task["predictions"][0])
    assert interface.validate_task({"data": task["data"]})
    task["predictions"][0]["result"][0]["from_name"] = "another"
    assert not interface.validate_prediction(task["predictions"][0])
