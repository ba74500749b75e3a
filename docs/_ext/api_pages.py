"""Sphinx: the directives `api`, which documents public names, and `methods`.

Docstrings are plain text with code in single backticks, and sections as Google's: `as_rest` and
`Backticks` show them as such.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from onnxgrad.training.trainer import TrainerBase

SUBMODULE = re.compile(r"^\.\. py:module:: onnxgrad\.([\w.]+)$", re.MULTILINE)
BLOCK = re.compile(r"^\.\. api::(?: ([\w.]+))?\n((?:\n|   \w+\n)+)", re.MULTILINE)


def documented_names(folder: Path) -> list[tuple[str, str]]:
    """Return each name that a page in `folder` documents, and the module that it is imported from.

    A name that is at the root and in a submodule, or in two submodules, is documented at one place.
    """
    blocks = [
        found for page in sorted(folder.glob("*.rst")) for found in BLOCK.findall(page.read_text())
    ]
    return [(name, module or "onnxgrad") for module, names in blocks for name in names.split()]


def pages_of_submodules(folder: Path) -> dict[str, str]:
    """Return the page in `folder` that documents each submodule, such as `onnxgrad.losses`."""
    return {
        submodule: page.stem
        for page in folder.glob("*.rst")
        for submodule in SUBMODULE.findall(page.read_text())
    }


API = Path(__file__).parents[1] / "api"
MODULES = dict(documented_names(API))
PAGES = pages_of_submodules(API)


class Api(SphinxDirective):
    """A table of the names in its content, one a line, then the documentation of each.

    The argument is the module that they are imported from, by default `onnxgrad`.
    """

    has_content = True
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what autosummary and autodoc write for the names."""
        names = [line.strip() for line in self.content if line.strip()]
        module = import_module(self.arguments[0] if self.arguments else "onnxgrad")
        lines = [
            f".. currentmodule:: {module.__name__}",
            "",
            ".. autosummary::",
            "   :nosignatures:",
        ]
        lines += ["", *(f"   {name}" for name in names if callable(getattr(module, name)))]
        for name in names:
            lines += ["", *_documented(name, getattr(module, name))]
        lines += ["", ".. currentmodule:: onnxgrad"]
        source = self.get_source_info()[0]
        return self.parse_text_to_nodes(StringList(lines, source=source))


def _documented(name: str, thing: Any) -> list[str]:
    """Return the directive of autodoc for a public name."""
    if isinstance(thing, type):
        kind = "exception" if issubclass(thing, BaseException) else "class"
        if issubclass(thing, TrainerBase):  # `methods` documents theirs on other pages
            return [f".. auto{kind}:: {name}"]
        return [f".. auto{kind}:: {name}", "   :members:"]
    if callable(thing):
        return [f".. autofunction:: {name}"]
    keys = ", ".join(f"`{key}`" for key in sorted(thing))
    return [f".. py:data:: {name}", "   :type: dict", "", f"   By name: {keys}."]


class Methods(SphinxDirective):
    """The documentation of the methods in its content, of the class that is the argument."""

    has_content = True
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what autodoc writes for the methods."""
        owner, lines = self.arguments[0], [".. currentmodule:: onnxgrad"]
        for name in [line.strip() for line in self.content if line.strip()]:
            thing = getattr(getattr(import_module("onnxgrad"), owner), name)
            kind = "property" if isinstance(thing, property) else "method"
            lines += ["", f".. auto{kind}:: {owner}.{name}"]
        return self.parse_text_to_nodes(StringList(lines, source=self.get_source_info()[0]))


class Backticks(SphinxRole):
    """Code in single backticks, which is a link where it is a public name or a submodule."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the code, inside of a reference if there is something to refer to."""
        code = nodes.literal(self.rawtext, self.text, classes=["code"])
        root, path = re.fullmatch(r"((?:onnxgrad|og)\.)?(.*)", self.text, re.DOTALL).groups()
        module, _, name = path.rpartition(".")
        if root and path in PAGES:  # a submodule, such as `onnxgrad.losses`
            target = {"refdomain": "std", "reftype": "doc", "reftarget": f"/api/{PAGES[path]}"}
        elif name in MODULES and (not module or module in PAGES):
            place = f"{MODULES[name]}.{name}"
            target = {"refdomain": "py", "reftype": "obj", "reftarget": place}
        else:
            return [code], []
        reference = pending_xref("", code, refexplicit=True, refwarn=True, **target)
        reference["refdoc"] = self.env.docname
        return [reference], []


def as_rest(_app, _kind, _name, _thing, _options, lines: list[str]) -> None:
    """Escape what is markup in reStructuredText, in the plain text of docstrings, as |x| or *."""
    paragraphs = re.split(r"(\n\s*\n)", "\n".join(lines))
    lines[:] = "".join(map(_escaped, paragraphs)).split("\n")


def _escaped(paragraph: str) -> str:
    """Return a paragraph with all but code and doctests escaped."""
    text, prompt, doctest = paragraph.partition(">>>")
    parts = re.split(r"(`[^`]+`|^ *\*+\w+:)", text, flags=re.M)  # code, and names of arguments
    parts[::2] = [re.sub(r"([*|]|_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts)) + prompt + doctest


def readable(_app, _kind, _name, _thing, _options, signature: str | None, result: str | None):
    """Return a signature with `...` for defaults that are no code, and the names of aliases."""
    if signature is None:
        return None
    signature = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature)
    return re.sub(r"= <[^,=]*>(?=[,)])", "= ...", signature), result


def setup(app: Sphinx) -> dict[str, Any]:
    """Add all to a site."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("api", Api)
    app.add_directive("methods", Methods)
    app.add_role("backticks", Backticks())
    app.connect("autodoc-process-docstring", as_rest, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", readable)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
