"""Pictures of the web page and of an audit for the README, from a real browser.

``python -m experiments.pictures audit/audit.html`` (after ``candid audit``; Chromium must be installed)
"""

import argparse
import os
import shutil
import sys
from importlib.resources import as_file, files
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from benchmarks.serving import server

BROWSER = os.environ.get("CANDID_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
MODEL, PHOTO = "cifar10-beta1", "cat.jpg"
WIDTH, PAGE_HEIGHT, AUDIT_HEIGHT = 1100, 1135, 1000
"""Of the browser's window: both pages go on below."""


def draw_page(browser: Browser, picture: Path) -> None:
    """What a visitor sees once an image was chosen."""
    threads = os.cpu_count() or 1
    with server(MODEL, threads) as port, as_file(files("candid.cli.samples") / PHOTO) as photo:
        page = browser.new_page(viewport={"width": WIDTH, "height": PAGE_HEIGHT})
        page.goto(f"http://127.0.0.1:{port}")
        page.set_input_files("#pick", photo)
        page.wait_for_selector("#space svg path.ring")
        page.wait_for_timeout(1000)  # until the page has faded in
        page.screenshot(path=picture)


def draw_audit(browser: Browser, audit: Path, picture: Path) -> None:
    """Its summary."""
    page = browser.new_page(viewport={"width": WIDTH, "height": AUDIT_HEIGHT})
    page.goto(audit.resolve().as_uri())
    page.screenshot(path=picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pictures", description=__doc__)
    parser.add_argument("audit", metavar="AUDIT.html", type=Path, help="the page of an audit")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="the folder (%(default)s)")
    asked = parser.parse_args()
    if BROWSER is None:
        sys.exit("There is no browser: apt-get install chromium, or name one in CANDID_BROWSER.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        draw_page(browser, asked.out / "page.png")
        draw_audit(browser, asked.audit, asked.out / "audit.png")
        browser.close()


if __name__ == "__main__":
    main()
