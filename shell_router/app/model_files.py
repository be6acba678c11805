"""The files in models' folders, read before anything is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shell_router.config import ModelSettings
from shell_router.core.engine import Tokenizer
from shell_router.core.exact_json import Values
from shell_router.core.marks import WRITTEN_CALL
from shell_router.core.sampling import MODEL_SAMPLING, check_sampling
from shell_router.engines.messages import VOCABULARY, MessageTokenizer
from shell_router.engines.tokenizer import HfTokenizer, read_json
from shell_router.errors import ConfigError, InvalidRequest, require

MESSAGES_CONTEXT = 131_072
"""The context of models without files, unless it is set; their servers refuse what is longer."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's folder and its content; one that takes messages has no folder."""

    folder: Path
    tokenizer: Tokenizer
    context_length: int
    vocabulary: int
    sampling: Values = field(default_factory=dict)

    def infer_call_parser(self) -> str | None:
        """Return the format in which the chat template writes calls of tools, if it is known."""
        parameters = {"type": "object", "properties": {}}
        function = {"name": "f", "description": "", "parameters": parameters}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
        chat: Sequence[Values] = [
            {"role": "user", "content": "f"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "f"},
        ]
        try:
            text = self.tokenizer.render_chat(chat, [{"type": "function", "function": function}])
        except InvalidRequest:
            return None
        return "hermes" if WRITTEN_CALL.search(text) else None


def read_files(models: Mapping[str, ModelSettings]) -> dict[str, ModelFiles]:
    """Read the files of each model by its alias; blocks. Raises ConfigError."""
    first: dict[str, HfTokenizer] = {}
    return {
        alias: _describe_messages(alias, settings)
        if "openai" in settings.engine
        else _read(alias, settings, first)
        for alias, settings in models.items()
    }


def _describe_messages(alias: str, settings: ModelSettings) -> ModelFiles:
    """Return what stands for files of a model whose server takes messages."""
    for name in ("path", "tool_call_parser", "quote_control_text", "drafts"):
        require(
            getattr(settings, name) in (Path(), None, False, "auto"),
            f"models.{alias}.{name} has no effect with `openai`: that is its server's.",
            "Leave it out.",
        )
    return ModelFiles(
        settings.path,
        MessageTokenizer(settings.chat_template_kwargs),
        settings.context_length or MESSAGES_CONTEXT,
        VOCABULARY,
        settings.sampling,
    )


def _read(alias: str, settings: ModelSettings, first: dict[str, HfTokenizer]) -> ModelFiles:
    """Read a model's files; `first` has the first tokenizer of each fingerprint."""
    folder = settings.path
    config = _config(folder, alias)
    length = settings.context_length or _count(config, "max_position_embeddings", folder, alias)
    vocabulary = _count(config, "vocab_size", folder, alias)
    tokenizer = HfTokenizer.from_folder(
        folder, settings.chat_template_kwargs, quotes_chats=settings.quote_control_text
    )
    # models of a family tokenize alike, so they share what one of them has tokenized
    tokenizer.remember_with(first.setdefault(tokenizer.fingerprint, tokenizer))
    return ModelFiles(folder, tokenizer, length, vocabulary, _read_sampling(settings, alias))


def _read_sampling(settings: ModelSettings, alias: str) -> Values:
    """Return the model's sampling parameters as SGLang's chats read them, below the settings."""
    file = settings.path / "generation_config.json"
    own = read_json(file) if file.exists() else {}
    known = {name: own[name] for name in MODEL_SAMPLING if own.get(name) is not None}
    sampling = {**known, **settings.sampling}
    check_sampling(sampling, path=f"{file} or models.{alias}.sampling")
    return sampling


def _config(folder: Path, alias: str) -> Values:
    """Read the model's configuration, or its text part in vision-language models."""
    if not folder.is_dir():
        raise ConfigError(
            f"models.{alias}.path: there is no folder {folder}.",
            remedy="Name the folder that holds the model; a relative path counts from the "
            "configuration's folder.",
        )
    config = read_json(folder / "config.json")
    return {**config, **(config.get("text_config") or {})}


def _count(config: Values, name: str, folder: Path, alias: str) -> int:
    count = config.get(name)
    if not isinstance(count, int):
        raise ConfigError(
            f"models.{alias}.path: {folder / 'config.json'} names no {name}.",
            remedy=f"Check the folder, or set models.{alias}.context_length where only the "
            "length is missing.",
        )
    return count
