"""`ChatTemplate`: the text of a conversation, rendered by jinja2 in a sandbox."""

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

Span = tuple[int, int]  # [start, end) of characters in a text
Messages = Sequence[Mapping[str, Any]]

# private-use characters that mark the body of `{% generation %}`
_BEGIN, _END = "\ue000<", "\ue000>"


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which encloses the turns of the assistant in newer templates."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the jinja2 nodes of the tag's body, between marks of the begin and end of a
        turn.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END)]
        return nodes.Scope([marks[0], *body, marks[1]], lineno=line)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Return a jinja2 sandbox with the filters and functions of chat templates in transformers."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    # as transformers does: no escapes of HTML
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    made.globals["raise_exception"] = _raise_template_error
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


class ChatTemplate:
    """The template by which a conversation becomes the text that a model reads.

    Args:
        text: a template of jinja2, as in `tokenizer_config.json` or `chat_template.jinja`.
        special: texts of special tokens by "bos", "eos" and others, which the template may use.

    Raises:
        ValueError: jinja2 cannot read the template.
    """

    def __init__(self, text: str, special: Mapping[str, str] | None = None) -> None:
        self.text = text
        self._tokens = {f"{name}_token": token for name, token in (special or {}).items()}
        try:
            self._template = _template_environment().from_string(text)
        except TemplateError as e:
            raise ValueError(f"the chat template is no valid jinja2: correct it: {e}") from None

    def render(self, messages: Messages, add_generation_prompt: bool = False, **more: Any) -> str:
        """Return the text that the template makes of a conversation's messages.

        Args:
            messages: the messages, each `{"role": ..., "content": ...}`.
            add_generation_prompt: whether to append the beginning of an answer of the assistant.
            more: other variables of the template, as `tools` or `enable_thinking`.

        Raises:
            ValueError: the template refuses the conversation, or fails.
        """
        text = self._marked_text(messages, add_generation_prompt, more)
        return text.replace(_BEGIN, "").replace(_END, "")

    def _marked_text(self, messages: Messages, prompt: bool, more: Mapping[str, Any]) -> str:
        """Return a conversation's text, with marks around assistant turns in `{% generation %}`."""
        given = {"tools": None, "documents": None, **self._tokens, **more}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=prompt, **given
            )
        except (TemplateError, TypeError) as e:
            raise ValueError(f"the chat template refuses the conversation: {e}") from None

    def assistant_spans(
        self, messages: Messages, first: int = 0, **more: Any
    ) -> tuple[str, list[Span]]:
        """Return a conversation's text, and the character span of each assistant turn in it.

        A turn is the text inside of `{% generation %}`, if the template has this tag; or else the
        text that the turn appends to the conversation before it, which ends with the beginning of
        an answer.

        Args:
            messages: as in `render`.
            first: number of the first message whose turns are returned.
            more: as in `render`.

        Raises:
            ValueError: as `render`, or a turn is not found in the text.
        """
        marked = self._marked_text(messages, False, more)
        text = marked.replace(_BEGIN, "").replace(_END, "")
        turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i >= first]
        if _BEGIN in marked:
            spans = _spans_of_marked_turns(marked)
            return text, spans[len(spans) - len(turns) :] if first else spans
        return text, [self._turn_span(text, messages, i, more) for i in turns]

    def _turn_span(self, text: str, messages: Messages, i: int, more: Mapping[str, Any]) -> Span:
        """Return the span of the turn of message `i`, for a template without `{% generation %}`."""
        before = self.render(messages[:i], True, **more) if i else ""
        until = self.render(messages[: i + 1], False, **more)
        content = messages[i].get("content")
        if i and text.startswith(before) and text.startswith(until):
            return len(before), len(until)
        # a template may write a turn differently if messages follow, such as without its thoughts
        said = content.strip() if isinstance(content, str) else ""
        start = len(before) if i and text.startswith(before) else None
        at = text.find(said, _common_prefix_length(before, text)) if said else -1
        if at < 0:
            raise ValueError(
                f"the text of the chat template does not show where message {i}, of the assistant, "
                f"begins and ends in the conversation: pass {argument('completion_only', False)}"
            )
        end, after = at + len(said), until[until.rfind(said) + len(said) :]
        ending = after[: _common_prefix_length(after, text[end:])]
        whole = max(ending.rfind(c) for c in ">]\n") + 1  # up to the end of a special token or line
        return at if start is None else start, end + (whole or len(ending))


def _common_prefix_length(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def _spans_of_marked_turns(text: str) -> list[Span]:
    """Return the span of each marked turn, in characters of the text without the marks."""
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
    """Return the chat template in a folder or in `config`, its `tokenizer_config.json`; or None."""
    text = config.get("chat_template")
    if (home / "chat_template.jinja").is_file():
        text = (home / "chat_template.jinja").read_text(encoding="utf-8")
    elif isinstance(text, list):
        by_name = {each["name"]: each["template"] for each in text}
        text = by_name.get("default", next(iter(by_name.values()), None))
    return None if not text else ChatTemplate(text, special)
