"""The Dockerfile, the manifests and the workflow say what the package does: names, ports, commands."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

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
