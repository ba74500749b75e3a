"""Sphinx: no page shows what only Python reads, and all pictures have a text in their place."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

# an object that says nothing of itself, and what functions of matplotlib return
REPR = re.compile(r"object at 0x|<(?:function|bound method|Axes|Figure)\b|<matplotlib|\bText\(-?\d")
THUMBNAIL = re.compile(r"(:alt:)(\n\n  :doc:[^\n]*\n\n.*?thumbnail-title\">)(.*?)(</div>)", re.S)


def name_thumbnails(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Give pictures in the index of a gallery the titles of their scripts, to be read aloud."""
    source[0] = THUMBNAIL.sub(r"\1 \3\2\3\4", source[0])


def check(_app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Warn of outputs that are no text for people, and name figures by their section."""
    logger = logging.getLogger(__name__)
    for found in REPR.finditer(doctree.astext()):
        line = doctree.astext()[found.start() - 80 : found.end() + 40]
        logger.warning("shows an object of Python: %r", line, location=name)
    for image in doctree.findall(nodes.image):
        section = image.parent
        while section is not None and not isinstance(section, nodes.section):
            section = section.parent
        if not image.get("alt") and section is not None:
            image["alt"] = section.next_node(nodes.title).astext()
        if not image.get("alt"):
            logger.warning("a picture without a text: %s", image["uri"], location=name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add both to a site."""
    app.connect("source-read", name_thumbnails)
    app.connect("doctree-resolved", check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
