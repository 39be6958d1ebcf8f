"""What must run without torch loads none, in processes of their own."""

import pkgutil
import subprocess
import sys

import candid._support
import candid.data

IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
USE = """
import sys, pathlib, tempfile
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Missing())
import numpy as np
from PIL import Image
from candid.data.batches import named_batches
from candid.data.datasets import open_dataset
from candid.data.images import Preprocessing, image_keys
folder = pathlib.Path(tempfile.mkdtemp())
for name in ("cat", "dog"):
    (folder / name).mkdir()
    for i in range(9):
        Image.effect_noise((30 + i, 25), 60).convert("RGB").save(folder / name / f"{i}.png")
for crop in ("none", "resized"):
    preprocessing = Preprocessing(3, 16, 16, crop)
    data = open_dataset(str(folder)).preprocess(preprocessing)
    batches = list(named_batches(data.train, preprocessing, 4, workers=2))
    assert sum(len(y) for _, y, _ in batches) == len(data.train)
    assert image_keys(batches[0][0]).dtype == np.int64
print(len(open_dataset("digits").train))
"""


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_support_and_data_load_no_torch() -> None:
    names = [
        module.name
        for package in (candid._support, candid.data)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    assert {"candid._support.processes", "candid.data.shards", "candid.data.splits"} < set(names)
    loaded = set(run(IMPORT, *names))
    assert "numpy" in loaded
    assert not {"torch", "lightning_fabric", "onnxruntime", "sklearn", "matplotlib", "webdataset"} & loaded


def test_data_sets_are_read_where_torch_is_missing() -> None:
    assert run(USE) == ["1368"]
