"""Take pictures of the landing page by Chromium: `python docs/screenshots.py build/site`.

Writes `docs/images/site-desktop.png`, `site-phone.png` and `site-dark.png`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
DARK, LIGHT = 0, 1  # of Chromium's setting preferredColorScheme
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
    for name, view in VIEWS.items():
        screenshot(Path(site, "index.html").resolve(), IMAGES / f"site-{name}.png", *view)


if __name__ == "__main__":
    main()
