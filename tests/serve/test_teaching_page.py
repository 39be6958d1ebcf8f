"""The loop of people in a real browser: correct, group, name, teach, see the new verdict, undo."""

from io import BytesIO
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from candid.serve import ServeOptions
from candid.serve.sensor import Sensor
from candid.serve.service import Service
from experiments.pictures import BROWSER
from tests.photo_models import PhotoRun, photo
from tests.serve.helpers import running
from tests.serve.test_page import Visit, browser

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="there is no browser: apt-get install chromium, or name one in CANDID_BROWSER"
)
__all__ = ["browser"]
LONG = 300_000
"""Milliseconds for a job in a process of its own, which has a low priority, on a machine that is busy."""


def encoded(kind: str, seed: int) -> bytes:
    file = BytesIO()
    photo(kind, seed).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)]
)
def test_the_loop_works_from_the_page_alone(
    browser: Browser, shapes: PhotoRun, trained: Service, tmp_path: Path, width: int, scheme: str
) -> None:
    sensor = Sensor.of(ServeOptions(store=tmp_path))
    size = {"width": width, "height": 844}
    context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    with running(trained, sensor=sensor, source=shapes.model, token="sesame") as server:
        visit = Visit(context.new_page(), server.url)
        page = visit.page
        page.locator("#token").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_contain_text("shapes")
        page.locator("#teach-open").press("Enter")
        expect(page.locator("#waiting-corrections")).to_contain_text("None yet")
        new = [
            (kind, seed) for kind, start in (("noise", 0), ("checks", 60)) for seed in range(start, start + 8)
        ]
        names = [*(f"{kind} {seed}.png" for kind, seed in new), "dots.png", "broken.png"]
        contents = [*(encoded(kind, seed) for kind, seed in new), encoded("dots", 91), b"no photo"]
        visit.choose(*contents, names=tuple(names))
        expect(page.locator("#announcer")).to_have_text("18 photos examined.")

        page.locator("#photos .name", has_text="dots.png").press("Enter")
        page.locator("#is").fill("rings")
        page.keyboard.press("Enter")
        expect(page.locator("#corrected-words")).to_have_text("Noted: it is rings.")
        expect(page.locator("#announcer")).to_contain_text("1 correction waits")
        assert visit.flaws(width) == []
        page.locator("#take-back").press("Enter")
        expect(page.locator("#corrected")).to_be_hidden()
        expect(page.locator("#teach-open")).to_have_text("Teach")

        page.locator("#teach-open").press("Enter")
        expect(page.locator("#lessons-title")).to_be_focused()
        assert visit.flaws(width) == []
        page.locator("#group-now").press("Enter")
        group = page.locator("#groups > li", has_text="unknown 1")
        boxes = group.locator("input[type=checkbox]")
        expect(boxes.first).to_be_checked(timeout=LONG)
        chosen = boxes.count()
        assert chosen >= 6
        known = names[int(str(boxes.first.get_attribute("value"))) - 1]  # the most central photo
        boxes.last.uncheck()  # it is of another kind
        group.locator("input[id^=group]").fill("a new kind")
        page.keyboard.press("Enter")
        expect(page.locator("#teach-open")).to_have_text(f"Teach ({chosen - 1})")
        assert visit.flaws(width) == []
        page.locator("#teach-now").press("Enter")
        lesson = page.locator("#models > li").first
        taught = f"Taught a new kind from {chosen - 1} photos. On held-out photos, mean recall"
        expect(lesson).to_contain_text(taught, timeout=LONG)
        expect(page.locator("#model")).not_to_contain_text("lesson")  # it does not answer yet
        lesson.locator("summary").press("Enter")
        expect(lesson.locator("tbody tr")).to_have_count(3)
        assert visit.flaws(width) == []

        lesson.locator("button").press("Enter")
        expect(page.locator("#teach-open")).to_have_text("Teach", timeout=LONG)  # nothing waits
        page.locator("#lessons-back").press("Enter")
        expect(page.locator("#photos tr", has_text=known)).to_contain_text("a new kind")
        expect(page.locator("#photos [data-kind='unusable']")).to_have_count(1)
        page.locator("#photos .name", has_text=known).press("Enter")
        expect(page.locator("#verdict-word")).to_contain_text("a new kind")

        page.locator("#teach-open").press("Enter")
        page.locator("#models > li").last.locator("button").press("Enter")
        expect(page.locator("#teach-open")).to_have_text(f"Teach ({chosen - 1})", timeout=LONG)
        page.locator("#lessons-back").press("Enter")
        expect(page.locator("#photos tr", has_text=known)).to_contain_text("novel")
        page.locator("#photos .name", has_text=known).press("Enter")
        page.locator("#back").press("Enter")
        expect(page.locator("#photos")).to_be_visible()
        expect(page.locator("#lessons")).to_be_hidden()
        assert server.client.get("/v1/drift").json()["images"] == 0  # judged again, not counted again
    context.close()
    assert visit.complaints == []
    assert all(url.startswith((server.url, "blob:", "data:")) for url in visit.asked)


def test_one_of_several_models_is_chosen(browser: Browser, trained: Service, service: Service) -> None:
    with running(trained, others=[service]) as server:
        phone = browser.new_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
        visit = Visit(phone, server.url)
        page = visit.page
        visit.choose(encoded("dots", 91))
        expect(page.locator("#classes li", has_text="stripes")).to_have_count(1)
        visit.explained()
        expect(page.locator("#known li").first).to_be_visible()  # on a phone, too
        page.locator("#model-choice").select_option("small")
        expect(page.locator("#classes li", has_text="cat")).to_have_count(1)
        assert visit.flaws(390) == [] == visit.complaints
        assert server.client.get("/v1/drift?model=small").json()["images"] == 0
        page.close()
