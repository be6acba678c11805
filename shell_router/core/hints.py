"""What a scheduler may know of a request beyond its prompt."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hints:
    """Who asks, for which place in which program, and how much is expected to be written. All of it is optional.

    Requests of one `user` tend to share prefixes, and have a fair share together. `program` is one run of the
    topology `topology`, `agent` the place in it. `output_tokens` are those that are expected of this request,
    `total_tokens` those of this request and of all that follow it in its program (Chimera, section 3.4), `path_tokens`
    those on the longest path from it to the program's end, which is what an answer waits for where agents run side by
    side.
    """

    user: str | None = None
    program: str | None = None
    topology: str | None = None
    agent: str | None = None
    output_tokens: float | None = None
    total_tokens: float | None = None
    path_tokens: float | None = None


NO_HINTS = Hints()
