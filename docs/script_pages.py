"""A hook of mkdocs that shows the scripts of pages on these pages, without a copy."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGES = {
    f"{name}.md": f"[{name}.py]({name}.py)\n" for name in ("ensembles", "explained", "training")
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the link to the script by the script as Markdown. mkdocs calls this for each page."""
    link = PAGES.get(page.file.src_uri)
    if link is None:
        return markdown
    script = FOLDER / page.file.src_uri.replace(".md", ".py")
    return markdown.replace(link, as_markdown(script.read_text()))


def as_markdown(script: str) -> str:
    """Return a script as Markdown: its docstring and unindented comments as text, the rest as code.

    The first line of the docstring is left out, as the page has a title of its own.
    """
    docstring = ast.parse(script).body[0]
    lines = script.splitlines()[docstring.end_lineno :]
    text = ast.get_docstring(ast.parse(script)) or ""
    parts = [text.partition("\n\n")[2]]
    for is_text, group in groupby(lines, lambda line: line.startswith("#")):
        if is_text:
            parts.append("\n".join(line[2:] for line in group))
        elif code := "\n".join(group).strip("\n"):
            parts.append(f"```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"
