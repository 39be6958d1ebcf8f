"""Pictures for the README: verdicts on photos, and the web page and an audit in a real browser.

``python -m experiments.pictures verdicts``, ``… photo-page``
``python -m experiments.pictures animation`` (Chromium must be installed)
``python -m experiments.pictures audit/audit.html`` (after ``candid audit``)
"""

import argparse
import base64
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.serving import server
from candid import examine, train
from candid.reports.demo import SAMPLES
from candid.reports.plots import style
from experiments.verdicts import verdicts

BROWSER = os.environ.get("CANDID_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
PAGE_MODEL = "everyday"
WIDTH, AUDIT_HEIGHT = 1100, 1000
"""Of the browser's window: the page goes on below."""
EVERYDAY = ("jeans", "sandal", "cat", "coffee", "moose", "cell")
WASTE = ("bottle", "tin", "vodka", "cat")
HATS = ("01", "03")
DROPPED = ("cat", "moose", "jeans")
ANIMATED = (900, 860)
START, STEP, READ = 1200, 90, 2700
"""Milliseconds: the first page, a step of a photo on its way, time to read a verdict."""
DRAG = """([photo, share]) => {
  const shown = document.getElementById("dragged") || document.body.appendChild(new Image());
  const drop = document.querySelector(".drop").getBoundingClientRect(), side = 110;
  const mix = (from, to) => from + (to - from) * share;
  Object.assign(shown, { id: "dragged", src: photo });
  Object.assign(shown.style, { position: "fixed", width: `${side}px`, borderRadius: "8px", zIndex: 9,
    left: `${mix(innerWidth, drop.left + drop.width / 2 - side / 2)}px`,
    top: `${mix(innerHeight, drop.top + drop.height / 2 - side / 2)}px` });
  document.body.classList.toggle("over", share > 0.6);
  return shown.decode();
}"""
LET_GO = """() => { document.getElementById("dragged").remove(); document.body.classList.remove("over"); }"""


def draw_verdicts(picture: Path) -> None:
    """Photos with the verdicts of two bundled models, and of a classifier of clothes that sees hats."""

    def files(kind: str, names: Sequence[str]) -> list[Path]:
        return [SAMPLES / kind / f"{name}.jpg" for name in names]

    with tempfile.TemporaryDirectory() as folder:
        train(str(SAMPLES / "clothes"), out=Path(folder) / "model")
        hats = examine(Path(folder) / "model", files("hats", HATS))
    rows = [
        {"everyday: a model of 1000 kinds of things": examine("everyday", files("everyday", EVERYDAY))},
        {
            "waste: a model of 6 kinds of waste": examine("waste", files("waste", WASTE)),
            "clothes: hats are new to it": hats,
        },
    ]
    _smaller(style.save(verdicts(rows), picture), picture)


def draw_photo_page(picture: Path) -> None:
    """The page of a hat that a classifier of clothes takes for shoes."""
    with tempfile.TemporaryDirectory() as folder:
        model, pages = Path(folder) / "model", Path(folder) / "pages"
        train(str(SAMPLES / "clothes"), out=model)
        hat = SAMPLES / "hats" / f"{HATS[0]}.jpg"
        options = ["--figures", str(pages)]
        subprocess.run([sys.executable, "-m", "candid", "examine", model, hat, *options], check=True)
        _smaller(next(pages.glob("*.png")), picture)


def _smaller(drawn: Path, picture: Path) -> None:
    """Write an image with 256 colours, which takes less than half the space."""
    with Image.open(drawn) as image:
        colours = image.convert("RGB")
    palette = colours.quantize(method=Image.Quantize.FASTOCTREE)
    colours.quantize(palette=palette).save(picture, optimize=True)


def draw_animation(browser: Browser, picture: Path) -> None:
    """Photos that are dropped on the page, one after the other."""
    frames: list[tuple[Image.Image, int]] = []
    with server(PAGE_MODEL, os.cpu_count() or 1) as port:
        page = browser.new_page(viewport={"width": ANIMATED[0], "height": ANIMATED[1]})
        page.goto(f"http://127.0.0.1:{port}")
        page.wait_for_selector("#can:not(:empty)")
        frames.append(_frame(page, START))
        for name in DROPPED:
            photo = SAMPLES / "everyday" / f"{name}.jpg"
            content = f"data:image/jpeg;base64,{base64.b64encode(photo.read_bytes()).decode()}"
            for i in range(1, 7):
                page.evaluate(DRAG, [content, i / 6])
                frames.append(_frame(page, STEP))
            page.evaluate(LET_GO)
            page.set_input_files("#pick", photo)
            page.wait_for_selector("#result[aria-busy=false]:not([hidden])")
            page.wait_for_timeout(1000)  # until the page has faded in
            frames.append(_frame(page, READ))
    images, durations = [image for image, _ in frames], [duration for _, duration in frames]
    images[0].save(
        picture, save_all=True, append_images=images[1:], duration=durations, loop=0, lossless=True
    )


def _frame(page: Page, milliseconds: int) -> tuple[Image.Image, int]:
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB"), milliseconds


def draw_audit(browser: Browser, audit: Path, picture: Path) -> None:
    """Its summary."""
    page = browser.new_page(viewport={"width": WIDTH, "height": AUDIT_HEIGHT})
    page.goto(audit.resolve().as_uri())
    page.screenshot(path=picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pictures", description=__doc__)
    parser.add_argument(
        "picture", help="verdicts, photo-page, animation, or the page of an audit: AUDIT.html"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="the folder (%(default)s)")
    asked = parser.parse_args()
    if asked.picture == "photo-page":
        return draw_photo_page(asked.out / "photo-page.png")
    if asked.picture == "verdicts":
        return draw_verdicts(asked.out / "verdicts.png")
    if BROWSER is None:
        sys.exit("There is no browser: apt-get install chromium, or name one in CANDID_BROWSER.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        if asked.picture == "animation":
            draw_animation(browser, asked.out / "page.webp")
        else:
            draw_audit(browser, Path(asked.picture), asked.out / "audit.png")
        browser.close()


if __name__ == "__main__":
    main()
