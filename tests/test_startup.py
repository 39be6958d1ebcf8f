"""What commands load, in real processes: help nothing heavy, photos no torch, verdicts on arrays only numpy.

Also what they say if an extra of the installation is missing.
"""

import inspect
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import candid
from candid._support.errors import EXTRAS
from candid.cli.app import COMMANDS
from candid.models import zoo
from tests.data.helpers import write_shard
from tests.photo_models import CLASSES, write_photos

HEAVY = {"torch", "numpy", "matplotlib", "scipy", "sklearn", "PIL", "lightning_fabric", "safetensors", "onnx"}
HEAVY |= {"onnxruntime"}
COMMAND_LINES = """
import contextlib, io, json, sys
from candid.cli.app import main
codes, errors = [], []
for line in json.loads(sys.argv[1]):
    sys.argv = ["candid", *line]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
        except SystemExit as end:
            codes.append(end.code or 0)
    errors.append(said.getvalue())
print()
print(json.dumps([codes, errors, list(sys.modules)]))
"""
MISSING = """
import os, sys
missing = set(os.environ["CANDID_MISSING"].split(","))

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""
"""A sitecustomize.py that hides packages from every process, as if they were not installed."""
EACH_FIRST = """
import importlib, sys
for name in sys.argv[1:]:
    for module in [m for m in sys.modules if m.split(".")[0] == "candid"]:
        del sys.modules[module]
    if name.startswith("candid."):
        importlib.import_module(name)
    else:
        getattr(importlib.import_module("candid"), name)
    print(name)
"""


class Ran:
    """Commands that ran one after the other in a process of their own."""

    def __init__(self, lines: list[list[str]], environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-c", COMMAND_LINES, json.dumps(lines)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | (environment or {})
        )
        assert done.returncode == 0, done.stderr
        self.codes, self.errors, modules = json.loads(done.stdout.splitlines()[-1])
        self.modules = set(modules)
        self.failed = [
            (line, error) for line, code, error in zip(lines, self.codes, self.errors, strict=True) if code
        ]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that have no extra of the installation."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "sitecustomize.py").write_text(MISSING)
    path = os.pathsep.join([str(folder), str(Path(candid.__file__).parents[1])])
    return {"PYTHONPATH": path, "CANDID_MISSING": ",".join(EXTRAS)}


def last_line(code: str, *arguments: object) -> list[str]:
    """The words of the last line that ``code`` prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split()


MISTAKES = (
    ["--vresion"],
    ["exmaine"],
    ["train", "--epoch", "3"],
    ["train", "--epochs", "three"],
    ["train"],
    ["train", "--resume"],
    ["examine", "model"],
    ["examine", "model", "image.png", "--novelty", "2"],
    ["import", "weights.pt", "--out", __file__],
)
HELP = ([], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS))


def test_help_and_mistakes_import_nothing_heavy() -> None:
    """All in one process: what one of them had loaded would be there at its end."""
    lines = [*HELP, ["models"], ["models", "cifar10-beta1"], *MISTAKES]
    ran = Ran(lines)
    assert ran.codes == [0] * (len(HELP) + 2) + [2] * len(MISTAKES), list(zip(lines, ran.codes, strict=True))
    assert "candid.cli.app" in ran.modules and not HEAVY & ran.modules


def test_examine_loads_neither_training_nor_compiler_nor_figures(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "black.png")
    line = ["examine", "cifar10-beta1", str(tmp_path / "black.png")]
    ran = Ran([line, [*line, "--json"]])
    assert ran.codes == [0, 0] and "torch" in ran.modules
    assert not {"lightning_fabric", "torch._dynamo", "sympy", "scipy", "matplotlib"} & ran.modules
    assert not {name for name in ran.modules if name.startswith(("candid.training", "candid.reports"))}


def test_examine_of_a_photo_loads_what_it_needs(tmp_path: Path) -> None:
    folder = write_photos(tmp_path, ("dots",), 1)
    for model in ("everyday", "waste"):
        ran = Ran([["examine", model, str(folder)]])
        assert ran.codes == [0] and "onnxruntime" in ran.modules
        assert not {"torch", "lightning_fabric", "scipy", "sklearn", "matplotlib", "rich"} & ran.modules
        others = ("candid.training", "candid.models.flow", "candid.models.resnet")
        assert not {name for name in ran.modules if name.startswith(others)}


ARRAYS = """
import sys
import numpy as np
import candid
random = np.random.default_rng(0)
logits, labels = random.normal(size=(400, 3)), random.integers(3, size=400)
monitor = candid.Monitor(risk=None).fit(logits, labels, features=random.normal(size=(400, 5)))
monitor.examine(logits[:5], features=random.normal(size=(5, 5)))
monitor.save(sys.argv[1])
candid.Monitor.load(sys.argv[1])
candid.Watch().fit(random.normal(size=200)).update(random.normal(size=50))
print(*sys.modules)
"""


def test_monitor_and_watch_need_numbers_alone(tmp_path: Path, without: dict[str, str]) -> None:
    for environment in ({}, without):
        done = subprocess.run(
            [sys.executable, "-c", ARRAYS, tmp_path / "monitor"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | environment,
        )
        modules = set(done.stdout.splitlines()[-1].split())
        assert not {"torch", "PIL", "onnxruntime", "onnx", "sklearn", "matplotlib"} & modules


SERVED = """
import os, signal, sys, threading, urllib.request
from candid.cli.app import run

*arguments, photo = sys.argv[1:]

def ask(url):
    body = b'--x\\r\\nContent-Disposition: form-data; name="file"; filename="a.png"\\r\\n\\r\\n'
    body += open(photo, "rb").read() + b"\\r\\n--x--\\r\\n"
    headers = {"content-type": "multipart/form-data; boundary=x"}
    request = urllib.request.Request(url + "/v1/examine?explain=true", body, headers)
    answer = urllib.request.urlopen(request, timeout=120).read()
    print(b'"judged"' in answer, *sys.modules, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

class Out:
    def write(self, text):
        if " at http" in text:
            threading.Thread(target=ask, args=(text.split(" at ")[1].split(";")[0],)).start()

    def flush(self):
        pass

    def isatty(self):
        return False

if __name__ == "__main__":
    sys.stdout = Out()
    run(["serve", *arguments])
"""


def photo_commands(folder: Path) -> list[list[str]]:
    """Every command about photos, each after those whose results it needs."""
    photos = write_photos(folder / "photos", CLASSES, 14)
    new = write_photos(folder / "new", ("checks",), 6)
    strange = write_photos(folder / "strange", ("noise",), 8)
    few = ["--severities", "3", "--corruption-images", "3"]
    run, image = str(folder / "run"), str(photos / "dots" / "000.png")
    lines: list[list[str | Path]] = [
        ["examine", "everyday", image],
        ["examine", "waste", image, "--figures", folder / "pages", "--json"],
        ["examine", "everyday", image, "--figures", folder / "pages"],
        ["train", photos, "--out", run],
        ["examine", run, image, "--figures", folder / "own pages", "--against", "rings"],
        ["evaluate", run, photos, "--ood", f"noise={strange}", "--out", folder / "evaluation"],
        ["teach", run, f"checks={new / 'checks'}", "--out", folder / "taught"],
        ["forget", folder / "taught", "checks", "--out", folder / "forgotten"],
        ["group", "everyday", strange, "--out", folder / "groups"],
        ["watch", run, photos, "--once"],
        ["corrupt", run, photos, "--corruptions", "jpeg_compression", "--images", "3", "--out", folder / "c"],
        ["adopt", "lite0", photos, "--out", folder / "adopted"],
        ["export", run, "--out", folder / "model.onnx"],
        ["adopt", folder / "model.onnx", photos, "--out", folder / "adopted file"],
        ["explain", run, "--out", folder / "explained"],
        ["audit", run, "--data", photos, *few, "--out", folder / "audit"],
        ["info", run],
    ]
    return [[str(word) for word in line] for line in lines]


@pytest.mark.parametrize("installed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_commands_about_photos_load_no_torch(
    installed: bool, tmp_path: Path, without: dict[str, str]
) -> None:
    """They run where torch is installed without loading it, and where no extra is installed."""
    ran = Ran(
        [
            line
            for line in photo_commands(tmp_path)
            if not (installed and line[0] == "audit")  # it attacks
        ],
        None if installed else without,
    )
    assert not ran.failed, ran.failed
    assert not {"torch", "lightning_fabric"} & ran.modules


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_server_of_a_photo_model_loads_no_torch(
    workers: str, tmp_path: Path, without: dict[str, str]
) -> None:
    image = write_photos(tmp_path, ("dots",), 1) / "dots" / "000.png"
    hidden = without | {"CANDID_MISSING": "torch,lightning_fabric"}
    done = subprocess.run(
        [sys.executable, "-c", SERVED, "waste", "--port", "0", "--workers", workers, image],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | hidden,
    )
    judged, *modules = done.stderr.splitlines()[-1].split()
    assert judged == "True" and "candid.serve.app" in modules and "torch" not in modules


def lines_that_need_extras(folder: Path) -> list[tuple[str, list[str]]]:
    """Commands, each with the extra that it needs."""
    Image.new("RGB", (32, 32)).save(folder / "black.png")
    write_shard(folder / "shard.tar", range(6))
    (folder / "weights.pt").write_bytes(b"PK")
    (folder / "photos.parquet").write_bytes(b"PAR1")
    pixel, data, image, out = "cifar10-beta1", str(folder), str(folder / "black.png"), str(folder / "out")
    own, shard = str(shutil.copytree(zoo.FOLDER / pixel, folder / "own")), str(folder / "shard.tar")
    photos = str(write_photos(folder / "photos", CLASSES, 5))
    paper = [
        ["examine", pixel, image],
        ["train", "digits", "--out", out],
        ["adopt", "cifar10-resnet", data, "--out", out],
        ["evaluate", pixel, "digits", "--out", out],
        ["calibrate", own, "digits"],
        ["refit", own, "digits"],
        ["group", pixel, data, "--out", out],
        ["corrupt", pixel, "digits", "--out", out],
        ["attack", pixel, "digits", "--out", out],
        ["explain", pixel, "--out", out],
        ["plane", pixel, "digits", "--out", out],
        ["info", "imagenet"],
        ["import", str(folder / "weights.pt"), "--out", out],
        ["watch", pixel, data, "--once"],
        ["export", pixel, "--out", f"{out}.onnx"],
        ["audit", pixel, "--data", "digits", "--out", out],
    ]
    return [
        *(("paper", line) for line in paper),
        ("web", ["serve", "waste"]),
        ("paper", ["train", shard, "--out", out]),  # of shards, too
        ("shards", ["evaluate", "waste", shard, "--out", out]),
        ("eyes", ["train", photos, "--eye", "lite1", "--out", out]),
        ("eyes", ["adopt", "lite2", photos, "--out", out]),
        ("hub", ["eyes", "hf:some/network"]),
        ("hub", ["push", "waste", "hf:some/model", "--yes"]),
        ("bulk", ["examine", "waste", str(folder / "photos.parquet"), "--out", f"{out} tables"]),
        ("export", ["export", "cifar10-resnet", "--out", f"{out}.onnx"]),
        ("tensorboard", ["train", "digits", "--tensorboard", "--epochs", "1", "--out", out]),
    ]


EXEMPT = {"models", "teach", "rename", "merge", "forget", "undo", "compare", "demo"}
"""Commands that need no extra: they take photo models, results or nothing; the demo leaves a part out."""


def test_a_command_without_its_extra_names_it_in_one_sentence(
    tmp_path: Path, without: dict[str, str]
) -> None:
    lines = lines_that_need_extras(tmp_path)
    assert {line[0] for _, line in lines} | EXEMPT == set(COMMANDS)
    assert {extra for extra, _ in lines} == set(EXTRAS.values())
    of_networks = [line for line in lines if line[0] in ("export", "tensorboard")]  # they need torch as well
    others = [line for line in lines if line not in of_networks]
    hidden = ",".join(name for name, extra in EXTRAS.items() if extra in ("export", "tensorboard"))
    for asked, names in ((others, ",".join(EXTRAS)), (of_networks, hidden)):
        ran = Ran([line for _, line in asked], without | {"CANDID_MISSING": names})
        for (extra, line), code, error in zip(asked, ran.codes, ran.errors, strict=True):
            assert code == 2 and error.count("\n") == 1, (line, error)
            assert error.rstrip().endswith(f"pip install 'candid-vision[{extra}]'."), (line, error)


CALLS = """
import candid
attack = lambda: candid.attack("cifar10-beta1", "digits")
for call in (lambda: candid.load("cifar10-beta1"), lambda: candid.ResNet, attack):
    try:
        call()
    except candid.CandidError as error:
        print(error)
"""


def test_a_call_without_its_extra_names_it_too(without: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, check=True, env=os.environ | without
    )
    sentences = done.stdout.splitlines()
    assert len(sentences) == 3 and all("pip install 'candid-vision[paper]'" in each for each in sentences)


def test_the_version_and_the_errors_import_nothing_heavy() -> None:
    modules = last_line(
        "import sys, candid; candid.__version__, candid.CheckpointError; dir(candid); print(*sys.modules)"
    )
    assert "candid" in modules and not HEAVY & set(modules)


def test_every_public_name_and_every_package_can_come_first() -> None:
    """Modules inside a package can, too: tests/test_storeys.py finds no cycle of imports."""
    modules = [each.name for each in pkgutil.walk_packages(candid.__path__, "candid.") if each.ispkg]
    assert {"candid.cli", "candid.models.flow"} < set(modules)
    assert last_line(EACH_FIRST, *candid.__all__, *modules)[-1] == modules[-1]


def test_star_brings_every_public_name() -> None:
    names = last_line("from candid import *; print(*globals())")
    assert set(candid.__all__) <= set(names)


def test_dir_lists_every_public_name_before_it_is_used() -> None:
    assert set(candid.__all__) <= set(last_line("import candid; print(*dir(candid))"))


def test_no_public_name_is_a_package_or_module() -> None:
    assert not set(candid.__all__) & {module.name for module in pkgutil.iter_modules(candid.__path__)}


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="'candid' has no attribute 'laod'"):
        candid.laod  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="laod"):
        from candid import laod  # type: ignore[attr-defined]  # noqa: F401


def test_old_names_still_work_and_say_what_they_are_called_now() -> None:
    for old, new in candid._RENAMED.items():
        with pytest.warns(DeprecationWarning, match=f"candid.{old} is now candid.{new}"):
            assert getattr(candid, old) is getattr(candid, new)
        assert old not in candid.__all__ and new in candid.__all__


def test_every_public_name_is_documented() -> None:
    for name in set(candid.__all__) - {"PRESETS", "__version__"}:
        value = getattr(candid, name)
        text = inspect.getdoc(value) or ""
        shown = ">>>" in text or ":func:`candid." in text  # a result's example stands at its function
        assert text and shown, f"{name} has no example"
        if inspect.isfunction(value):
            assert "Args:" in text and "Returns:" in text, name
