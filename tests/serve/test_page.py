"""The page in a real browser: what people see, hear and press."""

import base64
import csv
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from candid import ResNet, ResNetConfig
from candid.serve import ServeOptions
from candid.serve.sensor import Sensor
from candid.serve.service import Service
from experiments.pictures import BROWSER
from tests.helpers import small_classifier
from tests.serve.helpers import NAMES, Running, huge_png, picture, running, without_rounding

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no browser: apt-get install chromium, or name one in CANDID_BROWSER"
)
HEIC = (Path(__file__).parent.parent / "data" / "turned.heic").read_bytes()
DROP = """([name, content]) => {
  const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
}"""
PASTE = DROP.replace('DragEvent("drop", { dataTransfer', 'ClipboardEvent("paste", { clipboardData')
expect.set_options(timeout=60_000)  # on a machine that is busy
INK = "(id) => document.getElementById(id).toDataURL()"
BROKEN = """() => {
  const broken = [], texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let text; (text = texts.nextNode());) {
    const { parentElement: place } = text;
    if (place.closest(".name, #photo-name, .unseen") || !place.checkVisibility()) continue;
    for (const { 0: word, index } of text.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(text, index);
      range.setEnd(text, index + word.length);
      const places = [...range.getClientRects()];
      if (new Set(places.map((place) => Math.round(place.top))).size > 1) broken.push(`broken: ${word}`);
      if (places.some((place) => place.right > innerWidth + 1)) broken.push(`cut: ${word}`);
    }
  }
  return broken;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A visit of the page, with all that it asked for and complained of."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.asked, self.complaints = page, list[str](), list[str]()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.route("**/*", self._seen)
        page.goto(url)

    def _seen(self, route: Route) -> None:
        self.asked.append(route.request.url)
        route.continue_()

    def choose(self, *contents: bytes, names: tuple[str, ...] = ("cat.png",)) -> None:
        files: list[Any] = [
            {"name": name, "mimeType": "image/png", "buffer": content}
            for name, content in zip(names, contents, strict=True)
        ]
        self.page.set_input_files("#pick", files)

    def explained(self) -> None:
        """Ask why."""
        self.page.locator("#why").click()
        expect(self.page.locator("#heat-controls")).to_be_visible()

    def flaws(self, width: int) -> list[str]:
        """What axe finds, words that are broken or cut, and what is wider than the window."""
        # While the result fades in, its colours have less contrast.
        still = "() => document.getAnimations().every((each) => each.playState !== 'running')"
        self.page.wait_for_function(still)
        violations = Axe().run(self.page).response["violations"]
        too_wide = self.page.evaluate("document.documentElement.scrollWidth") > width
        return [
            *(f"{rule['id']}: {[node['html'] for node in rule['nodes']]}" for rule in violations),
            *self.page.evaluate(BROKEN),
            *["wider than the window"] * too_wide,
        ]


@pytest.fixture
def visit(browser: Browser, server: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 360, "height": 740})
    visit = Visit(context.new_page(), server.url)
    yield visit
    context.close()
    assert visit.complaints == []
    hosts = {urlsplit(url).netloc or urlsplit(url).scheme for url in visit.asked}
    assert hosts <= {urlsplit(server.url).netloc, "blob", "data"}


def test_an_image_is_judged_and_explained_on_request(visit: Visit, server: Running) -> None:
    page = visit.page
    expect(page.locator("#model")).to_contain_text("small")
    assert visit.flaws(360) == []
    page.locator("#help-open").click()
    expect(page.locator("#help")).to_be_visible()
    assert visit.flaws(360) == [] and len(page.locator("#help h2, #help dl").all_inner_texts()) == 2
    page.keyboard.press("Escape")
    (result,) = server.examine(picture(1), explain=True).json()["results"]
    watched = server.client.get("/v1/drift").json()["images"]
    page.evaluate(DROP, ["cat.png", base64.b64encode(picture(1)).decode()])
    expect(page.locator("#verdict-word")).to_contain_text(result["verdict"].capitalize())
    expect(page.locator("#announcer")).to_contain_text(result["verdict"].capitalize())  # for screen readers
    expect(page.locator("#seen")).to_be_visible()
    expect(page.locator("#classes li")).to_have_count(3)
    expect(page.locator("#classes li").first).to_contain_text(result["label"])
    expect(page.locator("#histogram svg")).to_contain_text("this image: p = ")
    words = page.locator("#promises").text_content()
    assert words is not None
    for sentence in (result["promises"]["plain"], *result["promises"]["sentences"]):
        assert sentence in words.replace("\u00a0", " ")
    assert not any("explain" in url for url in visit.asked)
    visit.explained()
    expect(page.locator("#space svg path.ring")).to_have_count(2)
    expect(page.locator("#reading")).to_have_text(result["explanation"]["summary"].replace("\u00a0", " "))
    expect(page.locator("#neighbours tr")).to_have_count(2)
    assert server.client.get("/v1/drift").json()["images"] == watched + 1  # the reasons do not count again
    assert visit.flaws(360) == []
    assert not {word for word in ("undefined", "NaN", "null") if word in page.locator("main").inner_html()}


def test_heatmaps_switch_by_keyboard_and_a_counterfactual_is_shown(visit: Visit) -> None:
    page = visit.page
    visit.choose(picture(1))
    visit.explained()
    first = page.locator("#maps input[value='0']")
    expect(first).to_be_checked()
    words, ink = page.locator("#map-words").inner_text(), page.evaluate(INK, "heat")
    first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#maps input[value='1']")).to_be_checked()
    assert page.locator("#map-words").inner_text() != words and page.evaluate(INK, "heat") != ink
    page.locator("#opacity").fill("20")
    expect(page.locator("#opacity-value")).to_have_text("20 %")
    expect(page.locator("#heat")).to_have_css("opacity", "0.2")
    page.locator("#maps label", has_text="saliency").click()
    expect(page.locator("#map-words")).to_contain_text("Most information")
    page.locator("#heat-controls summary").click()
    expect(page.locator("#map-table td")).to_have_count(4)
    page.locator("#maps label", has_text="what the model sees").click()
    expect(page.locator("#map-words")).to_contain_text("in its resolution")
    assert page.evaluate("document.getElementById('heat').width") == 16
    page.locator("#maps label", has_text="nothing").click()
    expect(page.locator("#heat")).to_be_hidden()
    page.locator("#change-form button").click()
    expect(page.locator("#steps li")).to_have_count(8)
    expect(page.locator("#change-words")).to_contain_text("standard deviations")


def test_bad_files_get_a_sentence_and_the_next_one_is_judged(visit: Visit) -> None:
    page = visit.page
    for content, words in (
        (b"text, not an image", "not an image"),
        (huge_png(), "pixels"),
        (b"", "it is empty"),
    ):
        visit.choose(content)
        expect(page.locator("#verdict-sentence")).to_contain_text(words)
        expect(page.locator("#could-be")).to_be_hidden()
    assert visit.flaws(360) == []
    page.evaluate(PASTE, ["", base64.b64encode(picture(1)).decode()])
    expect(page.locator("#classes li")).to_have_count(3)
    expect(page.locator("#place")).to_have_text("1 of 4")  # nothing is dropped; files come after verdicts
    visit.choose(HEIC, names=("phone.heic",))
    expect(page.locator("#photo-name")).to_have_text("phone.heic")
    expect(page.locator("#seen")).to_be_visible()


def test_thirty_photos_two_of_them_broken_by_keyboard_in_the_dark(browser: Browser, server: Running) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    visit = Visit(context.new_page(), server.url)
    page = visit.page
    expect(page.locator("#model")).to_contain_text("small")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    contents = [picture(i) for i in range(27)] + [HEIC, b"no photo", picture(2)[:-30]]
    names = [*(f"photo {i}.png" for i in range(27)), "phone.heic", "=no photo.png", "cut, here.png"]
    visit.choose(*contents, names=tuple(names))
    rows = page.locator("#photos tbody tr")
    expect(page.locator("#announcer")).to_have_text("30 photos examined.")
    expect(rows).to_have_count(30)
    expect(page.locator("#photos img.thumb")).to_have_count(28)  # HEIC, too
    expect(page.locator("#photos [data-kind='unusable']")).to_have_count(2)
    expect(page.locator("#photos tr", has_text="=no photo.png")).to_contain_text("not an image")
    asked = [url for url in visit.asked if url.endswith("/v1/examine")]
    assert len(asked) == 2  # at most 16 files a request
    kinds = ["novel", "ambiguous", "accept", "unusable"]
    order = [kinds.index(str(row.get_attribute("data-kind"))) for row in rows.all()]
    assert order == sorted(order)
    assert visit.flaws(1280) == []

    head = page.locator("#photos th", has_text="Posterior")
    head.locator("button").focus()
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(page.locator("#photos [aria-sort]")).to_have_count(1)
    page.locator("#photos th", has_text="Photo").locator("button").press("Enter")
    in_order = page.locator("#photos .name").all_inner_texts()
    numbered = [name for name in in_order if name.startswith("photo ")]
    assert numbered == [f"photo {i}.png" for i in range(27)]  # 2 before 10

    page.keyboard.press("Tab")
    for _ in range(4):  # past the other heads
        page.keyboard.press("Tab")
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#photos .name", has_text="photo 25.png")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#photo-name")).to_have_text("photo 25.png")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#photo-name")).to_have_text("photo 26.png")
    expect(page.locator("#place")).to_have_text("30 of 30")
    expect(page.locator("#seen")).to_be_visible()
    assert visit.flaws(1280) == []
    page.keyboard.press("Escape")
    expect(page.locator("#photos .name", has_text="photo 26.png")).to_be_focused()

    page.locator(".chip", has_text="can't be used").press("Enter")
    expect(rows).to_have_count(2)
    page.set_viewport_size({"width": 360, "height": 740})
    assert visit.flaws(360) == []
    page.locator(".chip", has_text="all 30").press("Enter")
    label = page.locator("#filter-class option").nth(1).inner_text()
    page.locator("#filter-class").select_option(label)
    assert 0 < rows.count() < 28
    assert visit.flaws(360) == []
    check_downloads(page, dict(zip(names, contents, strict=True)), server)
    page.locator("#clear").press("Enter")
    expect(page.locator("#guide")).to_be_visible()
    context.close()
    assert visit.complaints == []


def check_downloads(page: Page, contents: dict[str, bytes], server: Running) -> None:
    """All photos are in the files, whatever the table shows; the CSV says what the API says."""
    saved = {}
    for name in ("csv", "report"):
        with page.expect_download() as download:
            page.locator(f"#{name}").press("Enter")
        saved[name] = Path(download.value.path()).read_text(encoding="utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(saved["csv"])))
    assert [row["path"].removeprefix("'") for row in rows] == list(contents)
    assert rows[28]["path"] == "'=no photo.png" and "not an image" in rows[28]["error"]
    (result,) = server.examine(contents["photo 3.png"]).json()["results"]
    left_out = {"promises", "seen", "explanation", "path"}
    for key in result.keys() - left_out:
        text, value = rows[3][key], result[key]
        if value is None or isinstance(value, str):
            assert text == (value or "")
        else:
            assert json.loads(text) == without_rounding(value)
    assert list(rows[3]) == [key for key in result if key not in left_out or key == "path"] + ["error"]
    report = saved["report"]
    assert report.count('src="data:image/jpeg;base64,') == 28 and report.count("src=") == 28
    assert all(name in report for name in contents) and result["promises"]["plain"] in report
    assert "http" not in report.replace("http-equiv", "") and "<script" not in report


def test_what_a_model_cant_show_is_said(browser: Browser) -> None:
    config = ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")
    plain = small_classifier().requires_grad_(False)
    for model, note, hidden in (
        (ResNet(config, NAMES).eval(), "is a ResNet", ("#change", "#near", "#between", "#scale")),
        (plain, "no held-out scores", ("#typical", "#promises")),
    ):
        with running(Service(model, "other")) as server:
            page = browser.new_page()
            visit = Visit(page, server.url)
            visit.choose(picture(1))
            visit.explained()
            expect(page.locator("#notes")).to_contain_text(note)
            expect(page.locator("#verdict-word")).to_contain_text("%")
            for place in hidden:
                expect(page.locator(place)).to_be_hidden()
            assert visit.complaints == []
            page.close()


def test_an_example_of_an_adopted_model_has_heatmaps(browser: Browser) -> None:
    with running(Service.load("everyday", "everyday")) as server:
        page = browser.new_page()
        visit = Visit(page, server.url)
        expect(page.locator("#can")).to_have_text(
            "On request the page shows why: which parts of the image speak for which class."
        )
        assert server.client.get("/v1/example?name=../README.md").status_code == 404
        page.get_by_role("button", name="coffee").click()
        expect(page.locator("#photo-name")).to_have_text("coffee.jpg")
        visit.explained()
        expect(page.locator("#maps label")).to_have_count(6)  # two without, three classes, one not another
        expect(page.locator("#map-words")).to_contain_text("All positions together")
        for place in ("#change", "#near", "#between", "#known"):
            expect(page.locator(place)).to_be_hidden()
        assert visit.flaws(1280) == [] == visit.complaints
        page.close()


def test_a_large_file_is_not_even_sent(browser: Browser, service: Service) -> None:
    with running(service, max_megabytes=0.02) as server:
        page = browser.new_page()
        visit = Visit(page, server.url)
        expect(page.locator("#model")).to_contain_text("small")
        visit.choose(picture(1, (100, 100)), picture(1), names=("large.png", "small.png"))
        expect(page.locator("tr", has_text="large.png")).to_contain_text("larger than 0.02 MB")
        expect(page.locator("tr", has_text="small.png")).to_contain_text("%")
        assert server.metric('candid_refusals_total{reason="size"}') == 0
        page.close()


def test_the_page_asks_for_the_token_and_forgets_it(browser: Browser, service: Service) -> None:
    with running(service, token="sesame") as server:
        page = browser.new_page()
        visit = Visit(page, server.url)
        expect(page.locator("#token")).to_be_focused()
        assert visit.flaws(1280) == []
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#token-wrong")).to_contain_text("not correct")
        visit.choose(picture(1))  # it waits for the token
        page.locator("#token").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("small")
        expect(page.locator("#classes li")).to_have_count(3)
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert "sesame" not in kept and "sesame" not in page.content()
        page.reload()
        expect(page.locator("#token")).to_be_focused()
        page.close()


def test_the_api_page_comes_from_the_description(browser: Browser, server: Running) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
    visit = Visit(page, f"{server.url}/api")
    expect(page.locator("h2", has_text="POST /v1/examine")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert [rule["id"] for rule in Axe().run(page).response["violations"]] == []
    assert visit.complaints == []
    page.close()


def test_the_strip_and_the_list_of_verdicts(browser: Browser, service: Service, tmp_path: Path) -> None:
    sensor = Sensor.of(ServeOptions(store=tmp_path))
    context = browser.new_context(viewport={"width": 360, "height": 740})
    with running(service, sensor=sensor) as server:
        visit = Visit(context.new_page(), server.url)
        page = visit.page
        expect(page.locator("#kept")).to_have_text("which stores them")
        expect(page.locator("#drift")).to_be_hidden()
        visit.choose(picture(1))
        expect(page.locator("#drift")).to_contain_text("1 image watched for drift: no alarm")
        server.examine(picture(2), picture(3))
        page.locator("#last a").click()
        expect(page.locator("#verdicts li")).to_have_count(3)
        expect(page.locator("#counts")).to_contain_text("Stored: ")
        expect(page.locator("#drift")).to_contain_text("3 images watched")
        loaded = "() => [...document.images].every((image) => image.naturalWidth > 0)"
        page.wait_for_function(loaded)
        expect(page.locator("#evidence")).to_be_hidden()
        for _ in range(8):
            server.examine(*[picture(0, kind="PNG", size=(1, 1))] * 8)  # one colour
        page.reload()
        expect(page.locator("#drift")).to_contain_text("The images have changed since about image")
        expect(page.locator("#carriers li").first).to_contain_text("evidence ×")
        page.wait_for_function(loaded)
        assert visit.flaws(360) == [] == visit.complaints
    context.close()


class Proxy(BaseHTTPRequestHandler):
    """Serves another server at /candid/, as ``location /candid/ { proxy_pass http://…/; }`` of nginx."""

    behind = ""

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        if not self.path.startswith("/candid/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        passed = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        path = self.path.removeprefix("/candid")
        answer = httpx.request(
            self.command, self.behind + path, content=body, headers=passed, timeout=120, trust_env=False
        )
        self.send_response_only(answer.status_code)
        for name, value in answer.headers.items():
            if name not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_the_page_works_at_a_sub_path_of_a_proxy(browser: Browser, server: Running) -> None:
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), type("Behind", (Proxy,), {"behind": server.url}))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    page = browser.new_context().new_page()
    try:
        visit = Visit(page, f"http://127.0.0.1:{proxy.server_port}/candid/")
        visit.choose(picture())
        expect(page.locator("#verdict")).to_be_visible()
        visit.explained()
        page.locator("nav a", has_text="API").click()
        expect(page.locator("#example")).to_contain_text("/candid/v1/examine")
        page.locator("nav a", has_text="Page").click()
        expect(page.locator("#pick")).to_be_attached()
    finally:
        page.context.close()
        proxy.shutdown()
        proxy.server_close()
    addresses = {urlsplit(url).path for url in visit.asked if url.startswith("http")}
    assert visit.complaints == [] and all(path.startswith("/candid/") for path in addresses), addresses
