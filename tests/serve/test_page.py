"""The page in a real browser: what people see, hear and press."""

import base64
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from candid import ResNet, ResNetConfig
from candid.serve import ServeOptions
from candid.serve.sensor import Sensor
from candid.serve.service import Service
from experiments.pictures import BROWSER
from tests.helpers import small_classifier
from tests.serve.helpers import NAMES, Running, huge_png, picture, running

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no browser: apt-get install chromium, or name one in CANDID_BROWSER"
)
DROP = """([name, content]) => {
  const bytes = Uint8Array.from(atob(content), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
}"""
PASTE = DROP.replace('DragEvent("drop", { dataTransfer', 'ClipboardEvent("paste", { clipboardData')
expect.set_options(timeout=60_000)  # on a machine that is busy
INK = "(id) => document.getElementById(id).toDataURL()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A visit of the page, with all that it asked for and complained of."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.hosts, self.complaints = page, set[str](), list[str]()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.route("**/*", self._seen)
        page.goto(url)

    def _seen(self, route: Route) -> None:
        self.hosts.add(urlsplit(route.request.url).netloc or urlsplit(route.request.url).scheme)
        route.continue_()

    def choose(self, content: bytes, name: str = "cat.png") -> None:
        files = [{"name": name, "mimeType": "image/png", "buffer": content}]
        self.page.set_input_files("#pick", files)  # type: ignore[arg-type]

    def violations(self) -> list[str]:
        # While the result fades in, its colours have less contrast.
        still = "() => document.getAnimations().every((each) => each.playState !== 'running')"
        self.page.wait_for_function(still)
        found = Axe().run(self.page).response["violations"]
        return [f"{each['id']}: {[node['html'] for node in each['nodes']]}" for each in found]


@pytest.fixture
def visit(browser: Browser, server: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 360, "height": 740})
    visit = Visit(context.new_page(), server.url)
    yield visit
    context.close()
    assert visit.complaints == []
    assert visit.hosts <= {urlsplit(server.url).netloc, "blob", "data"}


def test_an_image_is_judged_and_explained(visit: Visit, server: Running) -> None:
    page = visit.page
    expect(page.locator("#model")).to_contain_text("small")
    (found,) = server.examine(picture(1), explain=True).json()["results"]
    page.evaluate(DROP, ["cat.png", base64.b64encode(picture(1)).decode()])
    expect(page.locator("#verdict-word")).to_contain_text(found["verdict"].capitalize())
    expect(page.locator("#announcer")).to_contain_text(found["verdict"].capitalize())  # for screen readers
    expect(page.locator("#classes li")).to_have_count(3)
    expect(page.locator("#classes li").first).to_contain_text(found["label"])
    expect(page.locator("#histogram svg")).to_contain_text("this image: p = ")
    expect(page.locator("#space svg path.ring")).to_have_count(2)
    expect(page.locator("#reading")).to_have_text(found["explanation"]["summary"].replace("\u00a0", " "))
    expect(page.locator("#neighbours tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert visit.violations() == []
    assert not {word for word in ("undefined", "NaN", "null") if word in page.locator("main").inner_html()}


def test_heatmaps_switch_by_keyboard_and_fade(visit: Visit) -> None:
    page = visit.page
    visit.choose(picture(1))
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
    page.locator("summary").click()
    expect(page.locator("#map-table td")).to_have_count(4)
    page.locator("#maps label", has_text="image alone").click()
    expect(page.locator("#heat")).to_be_hidden()


def test_a_counterfactual_is_shown(visit: Visit) -> None:
    page = visit.page
    visit.choose(picture(1))
    page.locator("#change-form button").click()
    expect(page.locator("#steps li")).to_have_count(8)
    expect(page.locator("#change-words")).to_contain_text("standard deviations")


def test_bad_files_get_a_sentence_and_the_next_one_is_judged(visit: Visit) -> None:
    problem = visit.page.locator("#problem")
    for content, words in (
        (b"text, not an image", "not an image"),
        (huge_png(), "pixels"),
        (b"", "it is empty"),
    ):
        visit.choose(content)
        expect(problem).to_contain_text(words)
        expect(visit.page.locator("#result")).to_be_hidden()
    assert visit.violations() == []
    visit.page.evaluate(PASTE, ["", base64.b64encode(picture(1)).decode()])
    expect(visit.page.locator("#verdict-word")).to_be_visible()
    expect(problem).to_be_hidden()


def test_what_a_model_cant_show_is_said(browser: Browser) -> None:
    config = ResNetConfig(height=16, width=16, classes=3, blocks=(1,), widths=(4,), stem="3x3")
    plain = small_classifier().requires_grad_(False)
    for model, note, hidden in (
        (ResNet(config, NAMES).eval(), "is a ResNet", ("#change", "#near", "#between", "#heat-controls")),
        (plain, "no held-out scores", ("#typical",)),
    ):
        with running(Service(model, "other")) as server:
            page = browser.new_page()
            visit = Visit(page, server.url)
            visit.choose(picture(1))
            expect(page.locator("#notes")).to_contain_text(note)
            expect(page.locator("#verdict-word")).to_contain_text("%")
            for each in hidden:
                expect(page.locator(each)).to_be_hidden()
            assert visit.complaints == []
            page.close()


def test_an_adopted_model_has_heatmaps_and_promises_no_more(browser: Browser) -> None:
    with running(Service.load("everyday", "everyday")) as server:
        page = browser.new_page()
        visit = Visit(page, server.url)
        expect(page.locator("#can")).to_have_text(
            "The page also explains why: it shows which parts of the image speak for which class."
        )
        visit.choose(picture(1))
        expect(page.locator("#maps label")).to_have_count(5)  # none, three classes, one instead of another
        expect(page.locator("#map-words")).to_contain_text("All positions together")
        for each in ("#change", "#near", "#between", "#known"):
            expect(page.locator(each)).to_be_hidden()
        assert visit.violations() == [] == visit.complaints
        page.close()


def test_a_large_file_is_not_even_sent(browser: Browser, service: Service) -> None:
    with running(service, max_megabytes=0.02) as server:
        page = browser.new_page()
        visit = Visit(page, server.url)
        expect(page.locator("#model")).to_contain_text("small")
        visit.choose(picture(1, (100, 100)))
        expect(page.locator("#problem")).to_contain_text("larger than 0.02 MB")
        assert server.metric('candid_refusals_total{reason="size"}') == 0
        page.close()


def test_the_page_asks_for_the_token_and_forgets_it(browser: Browser, service: Service) -> None:
    with running(service, token="sesame") as server:
        page = browser.new_page()
        visit = Visit(page, server.url)
        expect(page.locator("#token")).to_be_focused()
        assert visit.violations() == []
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#token-wrong")).to_contain_text("not correct")
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("small")
        visit.choose(picture(1))
        expect(page.locator("#verdict-word")).to_be_visible()
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
    assert visit.violations() == [] and visit.complaints == []
    page.close()


def test_a_wide_dark_page_is_for_everybody(browser: Browser, server: Running) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    visit = Visit(page, server.url)
    expect(page.locator("#model")).to_contain_text("small")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    visit.choose(picture(1))
    expect(page.locator("#verdict-word")).to_be_visible()
    assert visit.violations() == [] and visit.complaints == []
    page.close()


def test_the_strip_and_the_list_of_verdicts(browser: Browser, service: Service, tmp_path: Path) -> None:
    sensor = Sensor.of(service.description, ServeOptions(store=tmp_path))
    context = browser.new_context(viewport={"width": 360, "height": 740})
    with running(service, sensor=sensor) as server:
        visit = Visit(context.new_page(), server.url)
        page = visit.page
        expect(page.locator("#kept")).to_have_text("which stores it")
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
        assert visit.violations() == [] == visit.complaints
    context.close()
