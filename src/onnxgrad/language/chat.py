"""Chat templates: conversations as texts, rendered by jinja2 in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onnxgrad.errors import argument

Span = tuple[int, int]  # of characters: the first, and the one behind the last
Messages = Sequence[Mapping[str, Any]]

_BEGIN, _END = "\ue000<", "\ue000>"  # around what `{% generation %}` encloses; private characters


class _Generation(Extension):
    """`{% generation %}`, in which newer templates write the turns of the assistant."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Enclose the body in marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END)]
        return nodes.Scope([marks[0], *body, marks[1]], lineno=line)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Return what renders templates of strangers; they get what transformers gives them."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # no escapes of HTML
    made.globals["raise_exception"] = _raise_template_error
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


class ChatTemplate:
    """How a model is told a conversation.

    Args:
        text: a template of jinja2, as in `tokenizer_config.json` or `chat_template.jinja`.
        special: texts of special tokens by "bos", "eos" and others, which it may use.

    Raises:
        ValueError: it is no template.
    """

    def __init__(self, text: str, special: Mapping[str, str] | None = None) -> None:
        self.text = text
        self._tokens = {f"{name}_token": token for name, token in (special or {}).items()}
        try:
            self._template = _template_environment().from_string(text)
        except TemplateError as e:
            raise ValueError(f"the chat template is no template of jinja2: {e}") from None

    def render(self, messages: Messages, add_generation_prompt: bool = False, **more: Any) -> str:
        """Return the text of a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            add_generation_prompt: whether to append what an answer of the assistant begins with.
            more: other variables of the template, as `tools` or `enable_thinking`.

        Raises:
            ValueError: the template refuses the conversation, or fails.
        """
        text = self._render_marked(messages, add_generation_prompt, more)
        return text.replace(_BEGIN, "").replace(_END, "")

    def _render_marked(self, messages: Messages, prompt: bool, more: Mapping[str, Any]) -> str:
        given = {"tools": None, "documents": None, **self._tokens, **more}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=prompt, **given
            )
        except (TemplateError, TypeError) as e:
            raise ValueError(f"the chat template refuses the conversation: {e}") from None

    def spans(self, messages: Messages, first: int = 0, **more: Any) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and which characters the assistant has to say.

        These are its turns and their ends: the characters inside of `{% generation %}`, if the
        template has it, or else the text that a turn appends to the conversation before it, which
        ends with the beginning of an answer.

        Args:
            messages: as in `render`.
            first: number of the first message whose turns count.
            more: as in `render`.

        Raises:
            ValueError: as `render`, or the template has not said where turns are.
        """
        marked = self._render_marked(messages, False, more)
        text = marked.replace(_BEGIN, "").replace(_END, "")
        turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i >= first]
        if _BEGIN in marked:
            spans = _marked_spans(marked)
            return text, spans[len(spans) - len(turns) :] if first else spans
        return text, [self._turn_span(text, messages, i, more) for i in turns]

    def _turn_span(self, text: str, messages: Messages, i: int, more: Mapping[str, Any]) -> Span:
        """Return the characters of the turn `i`."""
        before = self.render(messages[:i], True, **more) if i else ""
        until = self.render(messages[: i + 1], False, **more)
        content = messages[i].get("content")
        if i and text.startswith(before) and text.startswith(until):
            return len(before), len(until)
        # a template may write a turn in another way once others follow, as without its thoughts
        said = content.strip() if isinstance(content, str) else ""
        start = len(before) if i and text.startswith(before) else None
        at = text.find(said, _common_length(before, text)) if said else -1
        if at < 0:
            raise ValueError(
                f"the chat template does not show where message {i} of the assistant is in the "
                f"conversation: pass {argument('completion_only', False)}"
            )
        end, after = at + len(said), until[until.rfind(said) + len(said) :]
        ending = after[: _common_length(after, text[end:])]
        whole = max(ending.rfind(c) for c in ">]\n") + 1  # without a part of the next token
        return at if start is None else start, end + (whole or len(ending))


def _common_length(a: str, b: str) -> int:
    """Return the length of the common beginning."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _marked_spans(text: str) -> list[Span]:
    """Return the spans between the marks, by the positions of the text without marks."""
    spans, at = [], 0
    for part in text.split(_BEGIN):
        inside, end, rest = part.partition(_END)
        if end:
            spans.append((at, at + len(inside)))
        at += len(inside) + len(rest)
    return spans


def read_template(
    home: Path, config: Mapping[str, Any], special: Mapping[str, str]
) -> ChatTemplate | None:
    """Return the chat template of a folder, whose `tokenizer_config.json` is `config`."""
    text = config.get("chat_template")
    if (home / "chat_template.jinja").is_file():
        text = (home / "chat_template.jinja").read_text(encoding="utf-8")
    elif isinstance(text, list):
        by_name = {each["name"]: each["template"] for each in text}
        text = by_name.get("default", next(iter(by_name.values()), None))
    return None if not text else ChatTemplate(text, special)
