"""The examples run, end with a table, and the paper in one file computes what the package does."""

import ast
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import candid
from candid.models.flow.config import ClassifierConfig, FlowConfig
from candid.trust.scores import SCORES

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = sorted(EXAMPLES.glob("*.py"))
PAPER = EXAMPLES / "paper.py"
TABLES = {
    "adopt.py": ("photo          class", "sandal.jpg     sandal"),
    "open_world.py": (
        "alarm after clothes, then after hats    False   True",
        "hats called novel, after teaching",
    ),
    "own_classifier.py": ("images        accept  ambiguous  novel", "noise           0.0%       0.0% 100.0%"),
    "own_score.py": ("score             0 to 7 called novel", "combined"),
    "paper.py": ("test accuracy", "negatives found by log p(x), AUROC"),
    "photos.py": ("photos        accept  ambiguous  novel", "hats"),
}
"""The heading and a row of the table that each example ends with."""


def test_the_examples_are_short() -> None:
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in SHORT}
    assert set(lines) == set(TABLES)
    assert lines.pop("paper.py") <= 250 and max(lines.values()) <= 60


@pytest.mark.parametrize("name", TABLES)
def test_an_example_ends_with_its_table(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *(("1", "1") if name == "paper.py" else ())])  # beta, epochs
    state = torch.random.get_rng_state()
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        SCORES.pop("margin", None)
        torch.random.set_rng_state(state)
    printed = capsys.readouterr().out
    heading, row = TABLES[name]
    assert heading in printed and row in printed.split(heading)[1]


def test_the_paper_in_one_file_needs_no_candid() -> None:
    nodes = ast.walk(ast.parse(PAPER.read_text(encoding="utf-8")))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    nodes = ast.walk(ast.parse(PAPER.read_text(encoding="utf-8")))
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "torch" in names and not [name for name in names if name.startswith("candid")]


def paper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper", PAPER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LARGER = FlowConfig(1, 16, 16, (1, 2, 1), (24, 48, 64), "none", pointwise_width=16, mixing="permutation")
"""The same layers for 16 x 16 pixels, whose cosine transform is not trivial."""


@pytest.mark.parametrize("size", [8, 16])
def test_the_paper_in_one_file_computes_what_the_package_does(size: int) -> None:
    """With the same weights: latents, likelihoods, posteriors, the inverse, the loss and its gradient."""
    if size == 8:
        package: Any = candid.GenerativeClassifier.from_preset("digits")
    else:
        package = candid.GenerativeClassifier(ClassifierConfig(LARGER, 10, mean=(0.3,), std=(0.38,)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        example = paper().Classifier(size)
        x, y = torch.randint(0, 256, (12, 1, size, size)) / 255, torch.arange(12) % 10
        for weights in package.parameters():  # away from where they start
            weights.data += 0.05 * torch.randn_like(weights)
    own = set(example.state_dict())
    assert own <= set(package.state_dict())
    example.load_state_dict({name: package.state_dict()[name] for name in own})
    package, example, x = package.double(), example.double(), x.double()
    package.image_mean.fill_(0.3)
    package.image_std.fill_(0.38)

    loss = paper().information_bottleneck_loss(example.eval(), x, y, 2.0)
    expected = candid.information_bottleneck_loss(package.eval(), x, y, 2.0).total
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    loss.backward()
    expected.backward()
    gradients = dict(package.named_parameters())
    for name, weights in example.named_parameters():
        torch.testing.assert_close(weights.grad, gradients[name].grad, rtol=1e-6, atol=1e-12, msg=name)
    with torch.no_grad():
        z, logits, _ = example(x)
        torch.testing.assert_close(z, package.latent(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(logits.softmax(1), package.posterior(x), rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(example.log_likelihoods(x), package.log_likelihoods(x), rtol=1e-9, atol=0)
        torch.testing.assert_close(example.invert(z), x, rtol=0, atol=1e-9)
