"""A model's own tokenizer and chat template, read from its folder without transformers or torch."""

import hashlib
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import orjson
from tokenizers import Tokenizer

from shell_router.engines.chat_template import ChatTemplate, read_chat_template
from shell_router.engines.stable_prefix import StablePrefix
from shell_router.errors import ConfigError

logger = logging.getLogger(__name__)

KEPT_TEXTS = 256
"""Texts whose ids are remembered: those that the agents of a few running trees share."""


class HfTokenizer:
    """Implements `core.model.Tokenizer` for a Hugging Face model folder with a `tokenizer.json`."""

    def __init__(
        self, tokenizer: Tokenizer, fingerprint: str, stable: StablePrefix, template: ChatTemplate | None, name: str
    ) -> None:
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._stable = stable
        self._template = template
        self._name = name
        self._lately_encoded = lru_cache(KEPT_TEXTS)(self._ids)
        self._lately_stable = lru_cache(KEPT_TEXTS)(self._stable_ids)

    @classmethod
    def from_folder(cls, path: str | Path, *, now: Callable[[], datetime] = datetime.now) -> Self:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template; raises ConfigError.

        `now` is the clock of templates that write the date.
        """
        folder = Path(path)
        definition = _read_json(folder / "tokenizer.json")
        settings_file = folder / "tokenizer_config.json"
        settings = _read_json(settings_file) if settings_file.exists() else {}
        tokenizer = _load(folder / "tokenizer.json")
        stable = StablePrefix(definition)
        if not stable.splits:
            logger.warning(
                "%s: this tokenizer merges across words, so prompts in text mode grow only as precursors finish", folder
            )
        return cls(
            tokenizer, id_fingerprint(definition), stable, read_chat_template(folder, settings, now), str(folder)
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all of `tokenizer.json` that decides ids."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`. What was tokenized lately is remembered: the agents of a tree share most texts."""
        return self._lately_encoded(text).tolist()

    def _stable_ids(self, text: str) -> "array[int]":
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return array("I", encoding.ids[: self._stable.tokens(text, encoding)])

    def remember_with(self, other: Self) -> None:
        """Use the memory of `other`, which must give the same ids; raises ValueError where it does not."""
        if other.fingerprint != self.fingerprint:
            raise ValueError("tokenizers of different fingerprints cannot share ids")
        self._lately_encoded, self._lately_stable = other._lately_encoded, other._lately_stable

    def _ids(self, text: str) -> "array[int]":
        return array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_stable(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stable`."""
        return self._lately_stable(text).tolist()

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """See `Tokenizer.render_chat`. Raises ConfigError without a template, InvalidRequest where it refuses."""
        if self._template is None:
            raise ConfigError(
                f"{self._name} has no chat template.",
                remedy="Add a chat_template.jinja to the model's folder, or send raw prompts.",
            )
        return self._template.render(messages)


def id_fingerprint(definition: Mapping[str, Any]) -> str:
    """SHA-256 over what decides the ids of a text: normalizer, pre-tokenizer, model and added tokens.

    Merges count the same in their two spellings, `"a b"` and `["a", "b"]`.
    """
    model = dict(definition.get("model") or {})
    if "merges" in model:
        model["merges"] = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    parts = {name: definition.get(name) for name in ("normalizer", "pre_tokenizer", "added_tokens")}
    return hashlib.sha256(orjson.dumps({**parts, "model": model}, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _load(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{file}: {error}.", remedy="Check the model's tokenizer.json.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist.", remedy="Name the folder of a Hugging Face model.") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}.", remedy="Fetch the file again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no JSON object.", remedy="Fetch the file again.")
    return found
