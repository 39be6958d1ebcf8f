"""What the README shows works as shown."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_python_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["z"].shape == (8, 3072)  # type: ignore[attr-defined]
