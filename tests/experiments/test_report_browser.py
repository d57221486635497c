"""The report in a real browser: readable at the widths of a phone and a desktop, light and dark."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed"),
]

# Written into a copy of the page, which has no script of its own.
MEASURE = """
<script>
addEventListener("load", () => {
  const box = (element) => element.getBoundingClientRect();
  const seen = {
    width: innerWidth,
    scrolls: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
    drawings: [...document.querySelectorAll("svg")].map((svg) => {
      const texts = [...svg.querySelectorAll("text")].filter((text) => text.textContent.trim());
      return {
        width: box(svg).width,
        height: box(svg).height,
        num_texts: texts.length,
        smallest: Math.min(...texts.map((text) => box(text).height)),
        left: Math.min(...texts.map((text) => box(text).left)),
        right: Math.max(...texts.map((text) => box(text).right)),
        colors: [...new Set(texts.map((text) => getComputedStyle(text).fill))],
      };
    }),
    columns: getComputedStyle(document.querySelector("#ttft .panels"))
      .gridTemplateColumns.split(" ").length,
  };
  parent.postMessage(JSON.stringify(seen), "*");
});
</script>
"""

# A window is 500 px wide at least, a frame in it is not.
FRAME = """
<script>
addEventListener("message", (event) => document.body.setAttribute("data-seen", event.data));
</script>
<body style="margin: 0"><iframe src="{page}" style="width: {width}px; height: 1400px; border: 0">
</iframe></body>
"""


def browse(page: Path, width: int, *, dark: bool, extra: list[str]) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={width},1400", f"--blink-settings=preferredColorScheme={1 - dark}"]
    command += ["--virtual-time-budget=4000", *extra, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def see(page: Path, width: int, *, dark: bool) -> dict[str, Any]:
    frame = page.with_name(f"{width}.html")
    frame.write_text(FRAME.format(page=page.name, width=width))
    text = browse(frame, max(width, 500), dark=dark, extra=["--dump-dom"])
    found = re.search(r'data-seen="([^"]*)"', text)
    assert found is not None
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert isinstance(seen, dict)
    return seen


@pytest.fixture(scope="module")
def page(out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("browser") / "report.html"
    text = (out / "report.html").read_text()
    path.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "num_columns"), [(390, 1), (1280, 3)])
def test_the_page_fits_and_its_pictures_can_be_read(
    page: Path, width: int, num_columns: int, dark: bool
) -> None:
    seen = see(page, width, dark=dark)
    assert seen["width"] == width
    assert seen["scrolls"] <= width
    assert seen["columns"] == num_columns
    assert seen["background"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    assert len(seen["drawings"]) > 15
    for drawing in seen["drawings"]:
        assert drawing["width"] > 300
        assert drawing["height"] > 100
        assert drawing["num_texts"] >= 4
        assert drawing["smallest"] >= 10
        assert drawing["left"] >= 0
        assert drawing["right"] <= width
        # Every placeholder has become a colour: black is what is left where none is set.
        assert "rgb(0, 0, 0)" not in drawing["colors"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_screenshot_shows_lines_in_colours_of_their_own(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    shot = tmp_path / "shot.png"
    browse(page, 1280, dark=dark, extra=[f"--screenshot={shot}"])
    picture = Image.open(shot).convert("RGB")
    counts = {color: count for count, color in picture.getcolors(maxcolors=2**24) or []}
    background = (20, 23, 27) if dark else (255, 255, 255)
    assert max(counts, key=lambda color: counts[color]) == background
    lines = [(98, 182, 255), (255, 147, 80)] if dark else [(0, 105, 179), (200, 80, 10)]
    for color in lines:
        assert counts.get(color, 0) > 100
