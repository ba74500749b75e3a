"""Photograph the report that `report.md` links: `python docs/report_pictures.py build/site`.

It takes Chromium and playwright that are installed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
SHOTS = {"desktop": (1100, "light"), "phone": (390, "light"), "dark": (1100, "dark")}


def photograph(page: Path) -> None:
    """Write the pictures of the upper part of a page, in two widths and in the dark."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name, (width, scheme) in SHOTS.items():
            opened = browser.new_page(
                viewport={"width": width, "height": 1500}, color_scheme=scheme
            )
            opened.goto(page.as_uri())
            if name == "dark":
                opened.locator("#predictions").scroll_into_view_if_needed()
                opened.evaluate("document.querySelector('#predictions').scrollIntoView()")
            opened.screenshot(path=IMAGES / f"report-{name}.png")
        browser.close()


if __name__ == "__main__":
    photograph(Path(sys.argv[1], "live", "report.html").resolve())
