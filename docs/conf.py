"""The documentation site: `make docs`. Sources are all pages of the repository, so that their links work."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docutils.nodes import SkipNode  # noqa: E402
from latex2mathml.converter import convert  # noqa: E402

import candid  # noqa: E402

project, author, version = "Candid", "The Candid contributors", candid.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/results/*.md", "docs/start/*.md", "examples/*.md"]
include_patterns += ["candid/models/zoo/*/README.md"]
exclude_patterns = [".venv*", "build", "demo", "tests", "experiments", "benchmarks"]
html_theme, html_title = "furo", "Candid"
html_show_copyright = html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
html_math_renderer = "mathml"
autodoc_typehints, autodoc_member_order = "none", "bysource"
autodoc_default_options = {"members": True}
napoleon_google_docstring, napoleon_numpy_docstring = True, False


def check_public_names(app: Any, error: Exception | None) -> None:
    """Fail if the reference leaves a public name out."""
    if error is None:
        documented = {name for name, *_ in app.env.get_domain("py").get_objects()}
        missing = [name for name in candid.__all__ if f"candid.{name}" not in documented]
        if missing:
            raise SystemExit(f"docs/reference.md leaves out: {', '.join(missing)}")


def with_targets(app: Any, name: str, source: list[str]) -> None:
    """Turn anchors in HTML into targets that links of other pages can be checked against."""
    source[0] = re.sub(r'<a id="([\w-]+)"></a>', r"[]{#\1}", source[0])


def visit_math(translator: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    display = "inline" if node.tagname == "math" else "block"
    translator.body.append(convert(node.astext(), display=display))
    raise SkipNode


def setup(app: Any) -> None:
    """Connect the check, the targets and the formulas."""
    app.connect("build-finished", check_public_names)
    app.connect("source-read", with_targets)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
