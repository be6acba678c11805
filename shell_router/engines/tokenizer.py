"""A model's tokenizer and chat template, read from its folder without transformers or torch."""

import hashlib
import json
import logging
import os
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, Self

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shell_router.core.control_text import BREAK, ControlText
from shell_router.core.engine import NO_OPTIONS, JoinedText
from shell_router.core.exact_json import NewValues, Values
from shell_router.engines.stable_prefix import StablePrefix
from shell_router.errors import ConfigError, InvalidRequest, PromptRefused

logger = logging.getLogger(__name__)

KEPT_BYTES = 2**24
"""Memory for texts and their ids, such as the agents of a few running trees share."""


class _Kept:
    """A thread-safe cache, within KEPT_BYTES, of the last texts' ids, computed by `ids_of`."""

    def __init__(self, ids_of: Callable[[str], "array[int]"]) -> None:
        self._ids_of = ids_of
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, text: str) -> list[int]:
        with self._lock:
            ids = self._kept.get(text)
            if ids is not None:
                self._kept.move_to_end(text)
        if ids is None:
            ids = self._ids_of(text)
            with self._lock:
                self._keep(text, ids)
        return ids.tolist()

    def _keep(self, text: str, ids: "array[int]") -> None:
        size = _size(text, ids)
        if text in self._kept or size > KEPT_BYTES // 4:  # a long text may not push out all others
            return
        self._kept[text] = ids
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            self._bytes -= _size(*self._kept.popitem(last=False))


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + ids.itemsize * len(ids)


_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_SPECIAL_TOKENS})
"""Variables that requests may not set. Templates write some of them after every message: a long one
would make a prompt that no memory holds.
"""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        special_tokens: Variables that it may name.
        now: The clock of templates that write the date.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self._template = environment.from_string(source)
        self._reads_parts = _PART_READER.search(source) is not None
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Values],
        tools: Sequence[Any],
        options: Values,
    ) -> str:
        """Render the prompt text of `messages`, up to where the assistant speaks.

        Raises:
            PromptRefused: The template refuses the messages.
            InvalidRequest: `options` sets a reserved variable.
        """
        if reserved := sorted(RESERVED & options.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs sets {reserved[0]!r}.",
                remedy="Leave it out: the router sets it.",
            )
        try:
            return self._render(messages, tools, options)
        except _REFUSALS as error:
            roles = {message["role"] for message in messages}
            for keeps_first in (True, False) if "system" in roles else ():
                with suppress(*_REFUSALS):
                    folded = _fold_system(messages, keeps_first=keeps_first)
                    return self._render(folded, tools, options)
            raise PromptRefused(
                f"The model's chat template refuses these messages: {error}.",
                remedy="Check their roles and their order, and chat_template_kwargs.",
            ) from error

    def _render(self, messages: Sequence[Values], tools: Sequence[Any], options: Values) -> str:
        chat = [dict(message) for message in messages]
        for message in chat if self._reads_parts else ():
            content = message.get("content")
            if isinstance(content, JoinedText) and message["role"] != "tool":
                message["content"] = [{"type": "text", "text": part} for part in content.parts]
        return self._template.render(
            messages=chat,
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
            **options,
        )


_REFUSALS = (jinja2.TemplateError, TypeError, KeyError, ValueError, ArithmeticError)
_PART_READER = re.compile(
    r"""image|audio|video|vision|\bin\s+(message|msg|m)(\.content|\[['"]content)"""
)
"""What SGLang looks for to tell a template that reads parts."""


def _fold_system(messages: Sequence[Values], *, keeps_first: bool) -> list[Values]:
    """Return the messages for a template that does not take all system messages.

    The first ones become one if it `keeps_first`. Others begin the user's next turn, or end the
    last one.
    """
    folded: list[Values] = []
    held: list[str] = []
    user: NewValues = {}
    for message in messages:
        if message["role"] == "system":
            held.append(message["content"])
            continue
        if keeps_first and held and not folded:
            folded.append({"role": "system", "content": "\n\n".join(held)})
            held = []
        if message["role"] == "user":
            user = {**message, "content": "\n\n".join([*held, message["content"]])}
            held = []
            folded.append(user)
        else:
            folded.append(message)
    if held:
        user["content"] = "\n\n".join([user["content"], *held])
    return folded


def read_chat_template(
    folder: Path, settings: Values, now: Callable[[], datetime]
) -> ChatTemplate | None:
    """Read the folder's template; None without one.

    `chat_template.jinja` takes precedence over `tokenizer_config.json`.

    Raises:
        ConfigError: Its syntax is wrong.
    """
    file = folder / "chat_template.jinja"
    source = settings.get("chat_template")
    if file.exists():
        source = file.read_text(encoding="utf-8")
    elif isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    special_tokens = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, Mapping):
            token = token.get("content")
        if isinstance(token, str):
            special_tokens[name] = token
    try:
        return ChatTemplate(source, special_tokens, now)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{folder}: the chat template's line {error.lineno} is wrong: {error.message}.",
            remedy="Fetch the model's files again.",
        ) from error


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training; ignored here."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Write JSON unescaped; Jinja's own filter escapes HTML, which no model wants to read."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class HfTokenizer:
    """A `core.engine.Tokenizer` for a Hugging Face model folder with a `tokenizer.json`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        fingerprint: str,
        stable: StablePrefix,
        template: ChatTemplate | None,
        name: str,
        options: Values = NO_OPTIONS,
        control: ControlText | None = None,
        *,
        quotes_chats: bool = False,
    ) -> None:
        self.control = control or ControlText()
        self._quotes_chats = quotes_chats
        self._tokenizer = tokenizer
        self._options = options
        self._fingerprint = fingerprint
        self._stable = stable
        self._template = template
        self._name = name
        self._cached_encoded = _Kept(self._ids)
        self._cached_stable = _Kept(self._stable_ids)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        options: Values = NO_OPTIONS,
        *,
        quotes_chats: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template.

        Args:
            path: The model's folder.
            options: Variables of the template that requests may override.
            quotes_chats: Whether control tokens that chats spell stay text.
            now: The clock of templates that write the date.

        Raises:
            ConfigError: A file is missing or wrong.
        """
        # threads of its own would not survive a fork
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        folder = Path(path)
        definition = read_json(folder / "tokenizer.json")
        settings_file = folder / "tokenizer_config.json"
        settings = read_json(settings_file) if settings_file.exists() else {}
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        stable = StablePrefix(definition)
        if not stable.splits:
            logger.warning(
                "%s: this tokenizer merges across words, so prompts in text mode grow only as "
                "precursors finish",
                folder,
            )
        template = read_chat_template(folder, settings, now)
        added = definition.get("added_tokens") or ()
        control = ControlText([token["content"] for token in added])
        fingerprint = id_fingerprint(definition)
        made = cls(
            tokenizer,
            fingerprint,
            stable,
            template,
            str(folder),
            options,
            control,
            quotes_chats=quotes_chats,
        )
        control.plain_ids = {
            token["id"]: []
            if token.get("special")
            else made.encode(control.quote(token["content"]))
            for token in added
            if token["content"].strip()
        }
        return made

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the parts of `tokenizer.json` that decide ids."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`; ids are cached, because the agents of a tree share most texts."""
        return self._cached_encoded(text)

    def _stable_ids(self, text: str) -> "array[int]":
        before, _, last = text.rpartition(BREAK)
        ids = array("I")
        if before:
            ids = self._ids(before)
        # alone, a text would be tokenized under the interpreter's lock
        (encoding,) = self._tokenizer.encode_batch([last], add_special_tokens=False)
        ids.extend(encoding.ids[: self._stable.tokens(last, encoding)])
        return ids

    def remember_with(self, other: Self) -> None:
        """Share the cache of `other`.

        Raises:
            ValueError: It does not give the same ids.
        """
        if other.fingerprint != self.fingerprint:
            raise ValueError("tokenizers of different fingerprints cannot share ids")
        self._cached_encoded = other._cached_encoded
        self._cached_stable = other._cached_stable

    def _ids(self, text: str) -> "array[int]":
        pieces = list(filter(None, text.split(BREAK)))
        encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        ids = array("I")
        for encoding in encodings:
            ids.extend(encoding.ids)
        return ids

    def encode_stable(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stable`."""
        return self._cached_stable(text)

    def render_chat(
        self,
        messages: Sequence[Values],
        tools: Sequence[Any] = (),
        options: Values = NO_OPTIONS,
    ) -> str:
        """See `Tokenizer.render_chat`.

        Raises:
            PromptRefused: The model has no template, or it refuses the messages.
        """
        if self._template is None:
            raise PromptRefused(
                f"{self._name} has no chat template.",
                remedy="Add a chat_template.jinja to the model's folder, or send raw prompts.",
            )
        if self._quotes_chats:
            messages = _quote_texts(messages, self.control.quote)
        return self._template.render(messages, tools, {**self._options, **options})


def _quote_texts(value: Any, quote: Callable[[str], str]) -> Any:
    """Return the value, of messages, with all of its texts quoted."""
    match value:
        case JoinedText(parts=parts):
            return JoinedText.of([quote(part) for part in parts])
        case str():
            return quote(value)
        case list() | tuple():
            return [_quote_texts(inner, quote) for inner in value]
        case Mapping():
            return {quote(name): _quote_texts(inner, quote) for name, inner in value.items()}
    return value


def id_fingerprint(definition: Values) -> str:
    """Hash what decides the ids of a text: normalizer, pre-tokenizer, model and added tokens.

    Merges count the same in their two spellings, `"a b"` and `["a", "b"]`.
    """
    model = dict(definition.get("model") or {})
    if "merges" in model:
        model["merges"] = [
            merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]
        ]
    parts = {name: definition.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}
    return hashlib.sha256(
        orjson.dumps({**parts, "model": model}, option=orjson.OPT_SORT_KEYS)
    ).hexdigest()


def load_tokenizer(file: Path) -> Tokenizer:
    """Load a `tokenizer.json`, without its truncation and padding; raises ConfigError."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"{file}: {error}.", remedy="Check the model's tokenizer.json."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_json(file: Path) -> NewValues:
    """Return the object in a model's file; raises ConfigError."""
    try:
        content = orjson.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file} does not exist.", remedy="Name the folder of a Hugging Face model."
        ) from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            f"{file} is not JSON: {error}.", remedy="Fetch the file again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object.", remedy="Fetch the file again.")
    return content
