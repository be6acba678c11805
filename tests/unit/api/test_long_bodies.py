"""The values of a body are counted without parsing it."""

import json
import threading
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from shell_router.api import ApiSettings
from shell_router.api.bodies import LONG_BODY_BYTES, count_values, read_body
from shell_router.api.services import SETTINGS

texts = st.text(st.sampled_from('"\\[]{},:u\nx'), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    if isinstance(value, dict):
        inner, keys = [*map(counted, value.values())], len(value)
    elif isinstance(value, list):
        inner, keys = [*map(counted, value)], 0
    else:
        return int(isinstance(value, str)), 0
    held, commas = sum(one for one, _ in inner), sum(one for _, one in inner)
    return 1 + keys + held, commas + max(0, len(inner) - 1)


@given(values, st.booleans())
def test_every_string_array_object_and_comma_is_counted_and_none_within_a_text(
    value: Any, escaped: bool
) -> None:
    assert count_values(json.dumps(value, ensure_ascii=escaped).encode()) == counted(value)


class Body(bytes):
    """Knows the threads that went through it."""

    threads: set[threading.Thread]

    def replace(self, *changes: Any) -> bytes:
        self.threads.add(threading.current_thread())
        return super().replace(*changes)


class Sent:
    """As much of a request as reading its body takes."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.app = {SETTINGS: ApiSettings()}

    async def read(self, limit_s: float) -> Body:
        return self.body


async def test_a_long_body_is_counted_off_the_event_loop() -> None:
    body = Body(
        b'"' + b"{" * (LONG_BODY_BYTES + 1) + b'"'
    )  # one value, which more than a glance shows
    body.threads = set()
    assert await read_body(cast(Any, Sent(body))) == body
    assert body.threads and threading.main_thread() not in body.threads
