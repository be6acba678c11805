"""The headers by which clients name a session and its parent; affinity follows the session."""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from shell_router.api.fields import IDENTIFIER_PATTERN
from shell_router.core.engine import Session

SESSION_HEADERS: Sequence[tuple[str, str, str]] = (
    ("x-routing-key", "", ""),  # this router's own
    ("x-smg-routing-key", "", ""),  # smg, policy manual
    ("x-dynamo-session-id", "", "x-dynamo-parent-session-id"),  # dynamo, agents.rs
    (  # dynamo, agents.rs
        "x-claude-code-session-id",
        "x-claude-code-agent-id",
        "x-claude-code-parent-agent-id",
    ),
    ("session-id", "thread-id", "x-codex-parent-thread-id"),  # dynamo, agents.rs
    ("x-session-affinity", "", "x-parent-session-id"),  # opencode, session/llm.ts
    ("x-session-token", "", ""),  # llm-d-router, sessionaffinity
    ("x-session-id", "", "x-parent-session-id"),  # opencode, session/llm.ts
    ("x-correlation-id", "", ""),  # aiperf, base_transports.py
)
"""The session, the agent of a session that all of its agents name, and the parent.

The first row whose session is sent counts.
"""


def read_session(headers: Mapping[str, str]) -> Session | None:
    """Return the session that the headers name, if any."""
    for root_name, agent_name, parent_name in SESSION_HEADERS:
        root = _read_name(headers, root_name)
        if not root:
            continue
        agent = _read_name(headers, agent_name) or root
        parent = _read_name(headers, parent_name)
        if agent != root:
            parent = parent or root
        return Session(agent, parent, root if agent_name else parent or root)
    return None


def _read_name(headers: Mapping[str, str], header: str) -> str:
    """Return the header's value, or its digest if it is unfit for logs."""
    name = headers.get(header, "")
    if not name or re.fullmatch(IDENTIFIER_PATTERN, name):
        return name
    return digest(name)


def digest(name: str) -> str:
    """Return a short name for a client's own, which may be long or hold anything."""
    return blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()
