"""Chat templates, rendered as transformers renders them."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shell_router.errors import ConfigError, InvalidRequest

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """One compiled template, with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        self._template = _environment(now).from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of `messages`, up to where the assistant speaks; raises InvalidRequest."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}.",
                remedy="Check their roles and their order.",
            ) from error


def read_chat_template(folder: Path, settings: Mapping[str, Any], now: Callable[[], datetime]) -> ChatTemplate | None:
    """The folder's template (`chat_template.jinja` before `tokenizer_config.json`), or None; raises ConfigError."""
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else _configured(settings.get("chat_template"))
    if source is None:
        return None
    try:
        return ChatTemplate(source, _special_tokens(settings), now)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{folder}: the chat template's line {error.lineno} is wrong: {error.message}.",
            remedy="Fetch the model's files again.",
        ) from error


def _configured(found: object) -> str | None:
    """A template given as text, or the one named `default` of several."""
    if isinstance(found, list):
        return next((one["template"] for one in found if one["name"] == "default"), None)
    return found if isinstance(found, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


class _Generation(Extension):
    """The tag `{% generation %}`, by which templates mark the assistant's words for training: no effect here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _tojson(found: Any, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which no model wants to read."""
    return json.dumps(found, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
