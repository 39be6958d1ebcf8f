"""What the README shows works as shown."""

import re
from pathlib import Path
from typing import Any

import pytest

import candid

README = Path(__file__).parents[1] / "README.md"


def test_the_python_code_of_the_readme_leaves_a_working_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["z"].shape == (8, 64)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert sum(label == str(i) for i, (label, *_) in enumerate(lines)) >= 6, lines
    assert {verdict for *_, verdict in lines} <= {"accept", "ambiguous", "novel"}
    (each,) = candid.examine(tmp_path / "my-model", scope["digits"][0])
    assert each.verdict is not None
