"""Take pictures of the site by Chromium: `python docs/screenshots.py build/site`.

Writes `docs/images/site-desktop.png`, `site-phone.png` and `site-dark.png` of the landing page, and
the same of the tutorial and the gallery.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
DARK, LIGHT = 0, 1  # of Chromium's setting preferredColorScheme
PAGES = {
    "site": "index.html",
    "tutorial": "auto_tutorials/finetune.html",
    "gallery": "auto_examples/index.html",
}
VIEWS = {"desktop": (1280, 900, LIGHT), "phone": (390, 1400, LIGHT), "dark": (1280, 1000, DARK)}


def screenshot(page: Path, path: Path, width: int, height: int, scheme: int) -> None:
    """Write a picture of the upper part of a page, `width` pixels wide."""
    # a frame, as Chromium has no window that is as narrow as a phone
    frame = (
        f'<body style="margin:0"><iframe src="{page.as_uri()}" width="{width}" height="{height}"'
    )
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder, "frame.html")
        outside.write_text(f'{frame} style="border:0"></iframe>')
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
        options += ["--allow-file-access-from-files", "--virtual-time-budget=5000"]
        options += [f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        options += [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={path}"]
        subprocess.run(["chromium", *options, outside.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Take all pictures of the site in the folder that the command line names."""
    [_, site] = sys.argv
    for name, page in PAGES.items():
        for view, size in VIEWS.items():
            screenshot(Path(site, page).resolve(), IMAGES / f"{name}-{view}.png", *size)


if __name__ == "__main__":
    main()
