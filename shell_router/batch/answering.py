"""One prompt on a loaded model, from messages to an output."""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from shell_router.batch.journal import Key, Output, Role
from shell_router.core.generation import Finish, Generation
from shell_router.core.model import ServedModel
from shell_router.early_exit.confidence import Confidence
from shell_router.errors import ConfigError, EngineError, EngineRejected, InvalidRequest

CLIENT_ERRORS = frozenset(range(400, 500)) - {408, 429}
"""Statuses by which an engine refuses this prompt; those left out say that it has no time for any."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What one model is asked: chat messages, and SGLang's sampling parameters."""

    question: str
    role: Role
    model: str
    messages: Sequence[Mapping[str, str]]
    sampling: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """What its output will be an output of."""
        return self.question, self.role, self.model

    def failed(self, error: str) -> Output:
        """The output that says why there is none."""
        return Output(self.question, self.role, self.model, error=error)


async def answered(model: ServedModel, prompt: Prompt) -> Output:
    """What the model writes. What it refuses for the prompt's own sake is an output too; raises other EngineErrors."""
    try:
        return await _asked(model, prompt)
    except (InvalidRequest, ConfigError) as error:  # the chat template or the engine refuses it
        return prompt.failed(str(error))
    except EngineRejected as error:
        if error.status in CLIENT_ERRORS:
            return prompt.failed(str(error))
        raise


async def _asked(model: ServedModel, prompt: Prompt) -> Output:
    ids = model.tokenizer.encode(model.tokenizer.render_chat(prompt.messages))
    wanted = prompt.sampling["max_new_tokens"]
    if len(ids) + wanted > model.context_length:
        return prompt.failed(
            f"A prompt of {len(ids)} tokens and {wanted} new ones are more than the {model.context_length} that"
            f" {model.alias!r} takes. Shorten the question, or lower max_new_tokens."
        )
    return await _written(model, prompt, ids)


async def _written(model: ServedModel, prompt: Prompt, ids: Sequence[int]) -> Output:
    texts: list[str] = []
    confidence = Confidence()
    request = Generation(uuid.uuid4().hex, ids, prompt.sampling, logprobs=True)
    async with aclosing(model.engine.generate(request)) as stream:
        async for item in stream:
            if isinstance(item, Finish):
                return Output(
                    prompt.question,
                    prompt.role,
                    prompt.model,
                    "".join(texts),
                    confidence.value or 0.0,
                    item.prompt_tokens,
                    item.completion_tokens,
                )
            texts.append(item.text)
            confidence.add(item.logprobs)
    raise EngineError(f"The stream of a prompt on {model.alias!r} ended without its last event.")
