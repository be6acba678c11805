"""What is known of an agent's prompt before anybody has written: for predictors, and for records to train them on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shell_router.core.generation import DEFAULT_MAX_NEW_TOKENS
from shell_router.core.model import Tokenizer
from shell_router.execution.requests import AgentRequest, OutputOf, Segment
from shell_router.topology import Agent
from shell_router.topology.prompting import fill_text


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The texts of a prompt without the outputs that will stand in it and without the chat template's marks.

    `system` is the system prompt, `user` the client's question, `rest` all other text. Where a framework sends raw
    segments, what it wrote is the question.
    """

    system: str
    user: str
    rest: str

    def tokens(self, tokenizer: Tokenizer) -> "PromptTokens":
        """How long they are."""
        system, user, rest = (
            len(tokenizer.encode(text)) if text else 0 for text in (self.system, self.user, self.rest)
        )
        return PromptTokens(system, user, system + user + rest)

    @property
    def characters(self) -> int:
        """Of all texts."""
        return len(self.system) + len(self.user) + len(self.rest)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of the system prompt, of the question, and of all that is known of the prompt."""

    system: int
    user: int
    known: int


def known_of_agent(agent: Agent, chat: Sequence[Mapping[str, str]]) -> KnownPrompt:
    """A topology's agent that is asked the last message of `chat`."""
    question = chat[-1]["content"]
    system = [fill_text(agent.prompt.system, question)] if agent.prompt.system else []
    system += [turn["content"] for turn in chat[:-1] if turn["role"] == "system"]
    rest = [turn["content"] for turn in chat[:-1] if turn["role"] != "system"]
    rest += [fill_text(agent.prompt.prefix, ""), fill_text(agent.prompt.suffix, "")]
    return KnownPrompt("\n\n".join(system), question, "\n".join(filter(None, rest)))


def known_of_request(request: AgentRequest) -> KnownPrompt:
    """An agent of somebody else's program."""
    if request.prompt:
        return KnownPrompt("", _text(request.prompt), "")
    by_role = {role: [_text(segments) for said, segments in request.messages if said == role] for role in _ROLES}
    user = by_role["user"][-1:] or [""]
    return KnownPrompt(
        "\n\n".join(by_role["system"]), user[0], "\n".join([*by_role["user"][:-1], *by_role["assistant"]])
    )


_ROLES = ("system", "user", "assistant")


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment for segment in segments if not isinstance(segment, OutputOf))


def wanted_tokens(sampling: Mapping[str, object]) -> int:
    """The most that an agent may write, as far as its sampling parameters say so soundly."""
    wanted = sampling.get("max_new_tokens")
    sound = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0
    return wanted if sound and isinstance(wanted, int) else DEFAULT_MAX_NEW_TOKENS
