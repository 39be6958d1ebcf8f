"""The figure of photos with their verdicts."""

from pathlib import Path

from matplotlib.text import Text
from PIL import Image

from candid.reports.plots import style
from candid.trust.verdict import Examination
from experiments.verdicts import verdicts


def test_verdicts_show_each_photo_with_its_numbers(tmp_path: Path) -> None:
    Image.new("RGB", (30, 20), "red").save(tmp_path / "red.png")
    path = str(tmp_path / "red.png")
    cat = Examination(path, {"cat": 0.6, "$dog$": 0.4}, 0.213, 0.2, "ambiguous", ("cat", "$dog$"))
    hat = Examination(path, {"shoes": 0.996, "cat": 0.004}, 0.0234, 0.02, "novel", ())
    plain = Examination(path, {"cat": 1.0, "$dog$": 0.0})
    figure = verdicts([{"pets": [cat], "clothes": [hat]}, {"without": [plain]}])
    words = "\n".join(text.get_text() for text in figure.findobj(Text))
    for each in ("cat 60 %\np = 0.21\nor \\$dog\\$", "shoes 99.6 %\np = 0.023", "no verdict", "clothes"):
        assert each in words
    assert len({bar.get_facecolor() for axes in figure.axes for bar in axes.child_axes}) == 3
    assert style.save(figure, tmp_path / "figure.png").stat().st_size > 0
