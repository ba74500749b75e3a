"""Options from a TOML file: the names of the command line, without the dashes in front."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxgrad.cli.options import OptionField
from onnxgrad.errors import printable, unknown

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_LISTS = "a list of texts, or a table"
_UNREAD = ("config", "debug")  # options that no TOML file may hold


def read_config(path: str, fields: Mapping[str, OptionField]) -> dict[str, Any]:
    """Return the options in a TOML file, `{name: value}`.

    A key stands at the top or in the section of its panel. Dashes and underscores are the same.
    """
    import tomllib  # imported here, as its expressions take long to compile

    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"--config {path} is no TOML file: correct it: {e}") from None
    except RecursionError:
        raise ValueError(f"{path} is no file of options: its lists are nested too deep") from None
    except OSError as e:
        raise OSError(f"cannot read --config {path}: {e.strerror or e}") from None
    fields = {name: f for name, f in fields.items() if name not in _UNREAD}
    return dict(_section_options(path, text, document, fields))


def _section_options(
    path: str, text: str, document: dict[str, Any], fields: Mapping[str, OptionField]
) -> Iterator[tuple[str, Any]]:
    sections = {f.section for f in fields.values()}
    for key, value in document.items():
        if not isinstance(value, dict) or key not in sections:
            yield _checked_option(f"{path}, line {_line_number(text, key)}", "", key, value, fields)
            continue
        for inner, one in value.items():
            where = f"{path}, line {_line_number(text, inner, key)}, in [{key}]"
            yield _checked_option(where, key, inner, one, fields)


def _checked_option(
    where: str, section: str, key: str, value: Any, fields: Mapping[str, OptionField]
) -> tuple[str, Any]:
    """Return the checked (name, value) of an option in a TOML file."""
    name = key.replace("-", "_")
    field = fields.get(name)
    if field is None:
        names = [n for n, f in fields.items() if section in ("", f.section)]
        raise ValueError(f"{where}: {unknown('option', key, names)}")
    if section and field.section != section:
        home = f"into [{field.section}], or " * bool(field.section) + "above all sections"
        raise ValueError(f"{where}: move {key} {home}")
    return name, _check_value(f"{where}: {key}", field, value)


def _check_value(what: str, field: OptionField, value: Any) -> Any:
    """Return a TOML value as the option's type; raise `ValueError` for a wrong type or bound."""
    kind = field.kind
    if kind is list:
        return _as_option_texts(what, value)
    numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, kind) and (kind is bool) == isinstance(value, bool)
    fits = fits or (kind is float and numbers)
    if kind is str and numbers:
        fits, value = True, str(value)  # as on the command line, where every value is a text
    if not fits:
        raise ValueError(f"{what} must be {_WORDS[kind]}, not {printable(value)!r}")
    low, high = field.more.get("min"), field.more.get("max")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"{low} or more" if high is None else f"from {low} to {high}"
        raise ValueError(f"{what} must be {bounds}, not {value}")
    return kind(value)


def _as_option_texts(what: str, value: Any) -> list[str]:
    """Return a TOML list, table or value as the texts of a repeated option; tables: NAME=VALUE."""
    if isinstance(value, dict):
        shown = {k: v if isinstance(v, str) else json.dumps(v) for k, v in value.items()}
        return [f"{name}={text}" for name, text in shown.items()]
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, (list, dict, bool)) for v in values):
        raise ValueError(f"{what} must be {_LISTS}, not {printable(value)!r}")
    return list(map(str, values))


def _line_number(text: str, key: str, section: str = "") -> int | str:
    """Return the number of the line of a TOML text that sets `key`; "?" if it is not found."""
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w-]+)\s*(\.[^\]]*)?\]", line):
            inside = header[1]
            if inside == key and not section:
                return number
        elif inside == section and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*[=.]""", line):
            return number
    return "?"
