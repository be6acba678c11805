"""Every error that a caller of the router may meet.

ShellRouterError
├── ConfigError              a configuration file is wrong
│   ├── TopologyError        a topology file is wrong: file, line and remedy
│   └── DataError            a file of questions is wrong: file, line and remedy
├── InvalidRequest           the client's request cannot be served as it stands
│   ├── InvalidField         one field of its body is missing, of a wrong type or out of range
│   ├── UnknownModel         neither a topology nor a model alias
│   ├── UnknownExpert        no expert of that name is in the pool
│   ├── PromptTooLong        prompt and output do not fit the model's context
│   ├── DuplicateAgent       this program already has an agent of that id
│   ├── UnknownProgram       no such program
│   ├── UnknownTrace         no such trace
│   ├── UnknownFile          no such file
│   ├── UnknownBatch         no such batch
│   ├── BatchEnded           the batch has ended, so it cannot be cancelled
│   ├── BatchesOff           this deployment keeps no files and runs no batches
│   └── FileTooLarge         an uploaded file is over the limit
├── Unauthorized             missing or wrong API key
│   └── RemoteRefused        no API keys are set, and the caller is not on this machine
├── Overloaded               a limit on running requests is reached
├── RouterStopping           the router was stopped before the request had ended
├── StorageFailed            the folder of the files and batches could not be read or written
├── EngineError              an engine could not serve
│   ├── EngineUnreachable    connection refused, reset or closed early
│   ├── EngineUnavailable    it failed so often of late that nothing is sent to it for now
│   ├── EngineRejected       the engine answered with an error status
│   ├── AdapterFailed        the engine could not load the request's adapter
│   ├── AdapterMissing       the engine does not have an adapter that it was taken to have
│   ├── EngineAborted        the engine ended the request as aborted, and not for the router's sake
│   └── EngineStalled        nothing came within the limit
├── ExpertError              an expert of a pool could not serve
│   ├── ExpertTooLarge       it fits into no executor's memory
│   ├── ExpertFailed         it did not load, or failed on its batch
│   └── MemoryBudgetExceeded more was to be reserved than a budget has left
├── AgentFailed              an agent failed whose topology says `on_failure: fail`
├── PrecursorTimeout         a precursor's output did not come within the limit
└── DeadlineExceeded         the request's own time limit passed
"""


class ShellRouterError(Exception):
    """An error with the facts in its message and, in `remedy`, what to do about it."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} {self.remedy}" if self.remedy else message


class ConfigError(ShellRouterError):
    """A configuration file is wrong; the message names the file and, where known, the line."""


class TopologyError(ConfigError):
    """A topology file is wrong; the message begins with `file:line:`."""


class DataError(ConfigError):
    """A file of questions is wrong; the message begins with `file:line:` where it is one line."""


class InvalidRequest(ShellRouterError):
    """The client's request cannot be served as it stands."""


class InvalidField(InvalidRequest):
    """A field of the request's body is missing, of a wrong type or out of range; `field` is its path."""

    def __init__(self, message: str, *, field: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.field = field


class UnknownModel(InvalidRequest):
    """The model is neither a topology nor a model alias."""


class UnknownExpert(InvalidRequest):
    """The pool has no expert of that name."""


class PromptTooLong(InvalidRequest):
    """Prompt and wanted output together exceed the model's context length."""


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


class BatchEnded(InvalidRequest):
    """The batch has ended, or is about to, so that it cannot be cancelled."""


class BatchesOff(InvalidRequest):
    """The deployment names no folder for files and batches."""


class FileTooLarge(InvalidRequest):
    """An uploaded file is over the limit."""


class Unauthorized(ShellRouterError):
    """The API key is missing or wrong."""


class RemoteRefused(Unauthorized):
    """No API keys are set, so that only callers on this machine are served, and this one is not."""


class Overloaded(ShellRouterError):
    """A limit on running requests is reached; trying again later may succeed."""


class RouterStopping(ShellRouterError):
    """The router was stopped, and the request had not ended within the drain."""


class StorageFailed(ShellRouterError):
    """The folder of the files and batches could not be read or written."""


class EngineError(ShellRouterError):
    """An engine could not serve a request."""


class EngineUnreachable(EngineError):
    """The connection was refused, reset, or closed before the answer ended."""


class EngineUnavailable(EngineError):
    """All servers that could serve the request failed so often of late that it was not sent."""


class EngineAborted(EngineError):
    """Somebody other than the router had the engine abort the request."""


class AdapterFailed(EngineError):
    """The engine could not load the adapter that the request names; requests for others go on."""


class AdapterMissing(EngineError):
    """The engine does not have an adapter that was loaded there: it was started again, or somebody unloaded it."""


class EngineRejected(EngineError):
    """The engine answered with an error status, kept in `status`."""

    def __init__(self, message: str, *, status: int, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.status = status


class EngineStalled(EngineError):
    """The engine sent nothing within the limit."""


class ExpertError(ShellRouterError):
    """An expert of a pool could not serve a request."""


class ExpertTooLarge(ExpertError):
    """The expert and one sample fit into no executor's memory, however empty."""


class ExpertFailed(ExpertError):
    """The expert did not load, or failed on the batch that the request was in; the cause is chained."""


class MemoryBudgetExceeded(ExpertError):
    """More memory was to be reserved than its budget has left: nothing was allocated."""


class AgentFailed(ShellRouterError):
    """An agent failed and its topology lets that fail the request; the cause is chained."""


class PrecursorTimeout(ShellRouterError):
    """A precursor's output did not come within the limit."""


class DeadlineExceeded(ShellRouterError):
    """The request did not end within its time limit."""
