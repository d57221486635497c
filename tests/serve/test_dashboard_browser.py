"""The dashboard in a real browser, with states of the tests' own making."""

import io
import re
import shutil
from collections.abc import Iterator

import pytest
from dashboard_server import PageServer, Shown, make_holdings, make_request, serving
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright
from replica_driver import ReplicaDriver, make_limits
from replica_driver import make_request as make_core_request

from rayserve_paged.core.cluster_view import ClusterEvent
from rayserve_paged.serve.dashboard_state import Reader, Totals

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

# Of every element with a text of its own: the ratio of its colour to what is behind it.
CONTRASTS = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parse(color).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (parse(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *")]
    .filter((each) => each.checkVisibility() && !each.matches(".skip, script, noscript"))
    .filter((each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
    .map((each) => {
      const pair = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
      return [each.outerHTML.slice(0, 80), (pair[0] + 0.05) / (pair[1] + 0.05)];
    });
}"""

UNNAMED = """() => [...document.querySelectorAll(
    "button, input, a, canvas[role], [role=grid], [role=gridcell], progress, section, th, #events")]
  .filter((each) => each.checkVisibility())
  .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.labels?.length ||
    document.getElementById(each.getAttribute("aria-labelledby"))))
  .map((each) => each.outerHTML)"""


def busy(num_blocks: int = 120) -> Shown:
    """r0: blocks 0 and 1 are shared by two requests, 2 is c-0's, 3 c-1's, 5 pinned, 6 cached."""
    held = {"c-0": [0, 1, 2], "c-1": [0, 1, 3]}
    return Shown(
        {"r0": make_holdings(num_blocks, held, [5], [6, 7])},
        (
            make_request("first", "c-0", "acme", num_output_tokens=50),
            make_request(EVIL, "c-1", EVIL, num_recoveries=2),
        ),
        Totals(output_tokens=100, ttft_p50_s=0.2, itl_p50_s=0.02),
        (ClusterEvent(1, 3.0, "replica lost", f"r1: {EVIL}"),),
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def shown() -> Shown:
    return busy()


@pytest.fixture
def server(shown: Shown) -> Iterator[PageServer]:
    with serving(shown) as server:
        yield server


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(10_000)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content" in said.text else None)
    yield page
    context.close()
    assert not faults


def center(page: Page, cell: int) -> tuple[float, float]:
    """Return the place of a cell of a map of up to 300 cells, in pixels within the map."""
    columns = int(page.locator(".map").get_attribute("aria-colcount") or 0)
    side = 22
    return (cell % columns + 0.5) * side, (cell // columns + 0.5) * side


def test_hovering_and_arrow_keys_name_the_holders_and_tab_leads_on(
    page: Page, server: PageServer
) -> None:
    page.goto(server.url)
    cursor, detail = page.locator(".cursor"), page.locator(".detail")
    x, y = center(page, 2)
    page.locator(".map").hover(position={"x": x, "y": y})
    expect(detail).to_contain_text("Block 2: held")
    expect(detail.get_by_role("listitem")).to_have_text(["first"])
    cursor.focus()
    page.keyboard.press("Home")
    expect(detail).to_contain_text("Block 0: shared")
    expect(detail.get_by_role("listitem")).to_have_text(["first", EVIL])
    expect(cursor).to_have_attribute("aria-label", re.compile("Block 0 shared, by first, <img"))
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text("Block 5: pinned")
    expect(detail.get_by_role("listitem")).to_have_text(["pin system"])
    page.keyboard.press("ArrowDown")
    columns = int(page.locator(".map").get_attribute("aria-colcount") or 0)
    expect(cursor).to_have_attribute("aria-label", f"Block {5 + columns} free")
    page.keyboard.press("End")
    expect(cursor).to_have_attribute("aria-label", "Block 119 free")
    width = cursor.evaluate("(each) => getComputedStyle(each).outlineWidth")
    assert width == "3px"
    page.keyboard.press("Tab")
    expect(page.locator("#events")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(cursor).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator("#theme")).to_be_focused()


def test_names_are_shown_as_text_and_run_nothing(page: Page, server: PageServer) -> None:
    answer = page.goto(server.url)
    assert answer is not None
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text=EVIL)).to_have_count(1)
    expect(page.locator("#events li")).to_contain_text([EVIL])
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "rayserve-paged"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_the_page_fits_its_window_and_can_be_read(
    page: Page, server: PageServer, scheme: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.goto(server.url)
    expect(page.locator("#requests tbody tr")).to_have_count(2)
    page.locator(".cursor").focus()
    expect(page.locator(".detail li")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    contrasts = dict(page.evaluate(CONTRASTS))
    assert len(contrasts) > 20
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}
    assert page.evaluate(UNNAMED) == []
    body = "getComputedStyle(document.body).backgroundColor"
    shades = {"light": "rgb(245, 246, 248)", "dark": "rgb(18, 21, 26)"}
    assert page.evaluate(body) == shades[scheme]
    # The button goes from the system's choice to light to dark, and the next visit keeps it.
    page.locator("#theme").click()
    assert page.evaluate(body) == shades["light"]
    page.locator("#theme").click()
    assert page.evaluate(body) == shades["dark"]
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert page.evaluate(body) == shades["dark"]


@pytest.mark.slow
def test_a_server_that_goes_away_is_missed_and_found_again(
    page: Page, shown: Shown, server: PageServer
) -> None:
    page.goto(server.url)
    status = page.locator("#status")
    expect(status).to_have_text("Live")
    shown.is_broken = True
    expect(status).to_have_text("Out of date: the server answered 503; trying again")
    server.stop()
    expect(status).to_have_text("The server is away; trying again")
    shown.is_broken = False
    shown.replicas = {}
    server.start()
    expect(status).to_have_text("No replica serves")
    expect(page.locator("#no-replicas")).to_be_visible()
    shown.replicas = busy().replicas
    expect(status).to_have_text("Live")
    expect(page.locator(".cursor")).to_have_count(1)


def test_a_key_is_asked_for_and_shows_its_own_tenants_names_alone(
    page: Page, shown: Shown, server: PageServer
) -> None:
    shown.readers = {
        "sk-acme": Reader("acme", sees_all=False),
        "sk-root": Reader("", sees_all=True),
    }
    page.goto(server.url)
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    expect(page.locator("#board")).to_be_hidden()
    key.fill("wrong")
    key.press("Enter")
    expect(page.locator("#key-error")).to_have_text("This key is not accepted.")
    key.fill("sk-acme")
    key.press("Enter")
    expect(page.locator("#requests tbody tr td:first-child")).to_have_text(
        ["firstacme", "another tenant"]
    )
    page.locator(".cursor").focus()
    expect(page.locator(".detail li")).to_have_text(["first", "another tenant"])
    stored = page.evaluate("[JSON.stringify({...localStorage}), document.cookie, location.href]")
    assert not any("sk-acme" in each for each in stored)
    assert page.evaluate("sessionStorage.getItem('key')") == "sk-acme"
    page.get_by_role("button", name="Forget key").click()
    expect(page.locator("#board")).to_be_hidden()
    assert page.evaluate("sessionStorage.getItem('key')") is None
    key.fill("sk-root")
    key.press("Enter")
    expect(page.locator("#requests tbody tr").filter(has_text=EVIL)).to_have_count(1)


@pytest.mark.parametrize(("num_blocks", "cells", "each"), [(5_000, 2500, 2), (500_000, 4066, 123)])
def test_a_large_pool_is_shown_in_cells_of_several_blocks(
    page: Page, shown: Shown, server: PageServer, num_blocks: int, cells: int, each: int
) -> None:
    shown.replicas = busy(num_blocks).replicas
    page.goto(server.url)
    grid, cursor = page.locator(".map"), page.locator(".cursor")
    expect(page.locator(".facts")).to_contain_text(f"One cell stands for {each} blocks")
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    columns = int(grid.get_attribute("aria-colcount") or 0)
    assert int(grid.get_attribute("aria-rowcount") or 0) == -(-cells // columns)
    cursor.focus()
    expect(page.locator(".detail p").first).to_contain_text(f"Blocks 0 to {each - 1}:")
    expect(page.locator(".detail li").first).to_have_text(
        "first · 3 blocks" if each > 2 else "first · 2 blocks"
    )
    page.keyboard.press("End")
    expect(page.locator(".detail p").first).to_contain_text(f"to {num_blocks - 1}:")
    expect(page.locator(".detail")).to_contain_text("Nobody holds them.")


def test_the_state_of_a_real_replica_is_drawn_as_it_accounts_for_it(
    page: Page, shown: Shown, server: PageServer
) -> None:
    driver = ReplicaDriver(make_limits(num_blocks=60))
    for name in ("a", "b"):
        driver.submit(make_core_request([*range(10), 50], 6, request_id=name))
        driver.step()
    figures = driver.replica.accounting()
    assert figures.num_shared_blocks == 2
    shown.replicas = {"r0": driver.replica.holdings()}
    shown.requests = (make_request("alpha", "a"), make_request("beta", "b"))
    page.goto(server.url)
    expect(page.locator(".facts")).to_contain_text("2 shared")
    picture = Image.open(io.BytesIO(page.locator(".map canvas").screenshot())).convert("RGB")
    colours = {colour: count for count, colour in picture.getcolors(2**20) or []}
    # A held block is a square of 20 pixels' side, a shared one has two bars of 7 instead.
    assert colours[0, 114, 178] == figures.block_map.count("#") * 400
    assert colours[194, 80, 10] == figures.block_map.count("=") * 280
    page.locator(".cursor").focus()
    for _ in range(figures.block_map.index("=")):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".detail li")).to_have_text(["alpha", "beta"])
