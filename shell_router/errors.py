"""Every error that a caller of the router may meet, as one tree below `ShellRouterError`."""

import re
from typing import Any

MOST_CHARACTERS = 4000
"""Limit of a message, which may quote megabytes of a request."""


_USER = re.compile(r"(?<!\S)((?>\S*?//))\S*@")


def hide_user(text: str) -> str:
    """Return the text without the users and passwords of its URLs, for logs and messages."""
    return _USER.sub(r"\1", text)


class ShellRouterError(Exception):
    """An error with the facts in its message and, in `remedy`, what to do about it.

    A retry after `retry_s`, if known, may succeed. `spent` is the usage by agent of a run that
    failed with it.
    """

    def __init__(self, message: str, *, remedy: str = "", retry_s: float | None = None) -> None:
        super().__init__(
            message if len(message) <= MOST_CHARACTERS else f"{message[:MOST_CHARACTERS]} ..."
        )
        self.remedy = remedy
        self.retry_s = retry_s
        self.spent: dict[str, Any] = {}

    def __str__(self) -> str:
        message = super().__str__()
        if not self.remedy:
            return message
        end = "" if message.endswith((".", "!", "?", ":")) else "."
        return f"{message}{end} {self.remedy}"


class ConfigError(ShellRouterError):
    """A configuration file, or a change of it, is wrong; the message names file and line."""


class SettingError(ConfigError, ValueError):
    """A class refuses its settings. It is a ValueError, so that pydantic adds their place."""


class TopologyError(ConfigError):
    """A topology file is wrong; the message begins with `file:line:`."""


class DataError(ConfigError):
    """A file of questions is wrong; the message begins with `file:line:` if one line is."""


class InvalidRequest(ShellRouterError):
    """The client's request cannot be served as it stands."""


class InvalidField(InvalidRequest):
    """A field of the request's body is missing or wrong; `field` is its path."""

    def __init__(self, message: str, *, field: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.field = field


class UnknownModel(InvalidRequest):
    """The model is neither a topology nor a model alias."""


class UnknownTopology(InvalidRequest):
    """No topology of that name is served."""


class TopologyConflict(InvalidRequest):
    """The name of a topology is taken, or another topology needs it as it is."""


class TopologiesOff(InvalidRequest):
    """The deployment does not let clients change, list or bring topologies."""


class PromptRefused(InvalidRequest):
    """A model cannot take the prompt; another model may.

    `excess` is the number of tokens of prompt and output beyond its context, if an engine says it.
    """

    excess = 0

    def name_agent(self, agent: str, model: str) -> "PromptRefused":
        """Return the same error with the agent and its model in the message."""
        message = f"Agent {agent!r} cannot ask {model!r}: {self.args[0]}"
        return type(self)(message, remedy=self.remedy)


class PromptTooLong(PromptRefused):
    """Prompt and requested output together exceed the model's context length."""


class DuplicateAgent(InvalidRequest):
    """The program already has an agent of that id."""


class UnknownProgram(InvalidRequest):
    """No program of that id is known for this tenant."""


class UnknownTrace(InvalidRequest):
    """No trace of that id is held."""


class UnknownFile(InvalidRequest):
    """No file of that id is kept for this tenant."""


class UnknownBatch(InvalidRequest):
    """No batch of that id is known for this tenant."""


class UnknownResponse(InvalidRequest):
    """No background response of that id is known for this tenant."""


class ResponseCancelled(InvalidRequest):
    """A background response was cancelled while it was read, or continued by another router."""


class StreamChanged(InvalidRequest):
    """The resumed stream does not match what the client has received."""


class BatchEnded(InvalidRequest):
    """The batch has ended or is about to, so it cannot be cancelled."""


class FileTooLarge(InvalidRequest):
    """An uploaded file is over the limit."""


class QuotaExceeded(InvalidRequest):
    """The tenant may keep no more files, or no more bytes."""


class KeyReused(InvalidRequest):
    """The Idempotency-Key was sent before, with another body."""


class Unauthorized(ShellRouterError):
    """The API key is missing or wrong."""


class RemoteRefused(Unauthorized):
    """No API keys are set, so callers on other machines are not served."""


class UnsupportedMediaType(RemoteRefused):
    """The body's Content-Encoding is unknown, or pages of other sites can send its Content-Type."""


class Forbidden(ShellRouterError):
    """The API key is valid, but does not permit this."""


class Overloaded(ShellRouterError):
    """A limit on running requests is reached; a retry may succeed."""


class RouterStopping(ShellRouterError):
    """The router was stopped, and the request had not ended within the drain."""


class StorageFailed(ShellRouterError):
    """The folder of the files and batches could not be read or written."""


class EngineError(ShellRouterError):
    """An engine could not serve a request."""


class EngineUnreachable(EngineError):
    """The connection was refused, reset, or closed before the answer ended."""


class EngineUnavailable(EngineError):
    """The circuit breakers of all servers that could serve the request are open."""


class EngineAborted(EngineError):
    """The engine ended the request as aborted, although the router did not ask for it."""


class AdapterMissing(EngineError):
    """The engine was started without the LoRA adapter that the request names."""


class ModelFailed(EngineError):
    """A model that takes turns with others could not be loaded; requests for others go on."""


class WeightsLost(EngineError):
    """An engine was restarted and lost the weights of a model that takes turns with others."""


class EngineRejected(EngineError):
    """The engine answered with an error status, kept in `status`."""

    def __init__(self, message: str, *, status: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class EngineStalled(EngineError):
    """The engine sent nothing within the limit."""


class AgentTimeout(EngineStalled):
    """The engine did not end an agent's output within the agent's own limit."""


class AgentFailed(ShellRouterError):
    """An agent failed, and its topology lets that fail the request; the cause is chained."""


class PrecursorTimeout(ShellRouterError):
    """A precursor's output did not come within the limit."""


class BudgetExceeded(ShellRouterError):
    """The request, its program or its key has spent what it may, and there is no output."""


class DeadlineExceeded(ShellRouterError):
    """The request did not end within its time limit."""


def require(holds: bool, message: str, remedy: str = "") -> None:
    """Raise SettingError unless `holds`; the reader of the file adds its name and the line."""
    if not holds:
        raise SettingError(message, remedy=remedy)
