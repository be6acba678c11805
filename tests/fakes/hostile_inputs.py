"""Requests of a hostile client, by family.

Each is refused with a 4xx that says why, and leaves nothing running.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT, AGENT, GENERATE, PREFILL = (
    "/v1/chat/completions",
    "/v1/agent/requests",
    "/generate",
    "/prefill_only",
)
RESPONSES, COMPLETIONS, BATCHES, FILES = (
    "/v1/responses",
    "/v1/completions",
    "/v1/batches",
    "/v1/files",
)
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
FAR = 2**63


@dataclass(frozen=True)
class Hostile:
    """A request of a hostile client."""

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def post(path: str, body: object, **headers: str) -> Hostile:
    """`body` as JSON, unless it is bytes."""
    return Hostile(
        "POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers
    )


USER = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "small", "messages": USER},
    AGENT: {"program": "p", "agent": "a", "model": "small", "prompt": "Hi"},
    GENERATE: {"text": "x"},
    PREFILL: {"input_ids": [1]},
    RESPONSES: {"model": "small", "input": "Hi"},
    MESSAGES: {"model": "small", "max_tokens": 5, "messages": USER},
    EMBEDDINGS: {"model": "none", "input": "Hi"},
    BATCHES: {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"},
}


def fields(path: str, **wrong: Iterable[object]) -> Iterator[Hostile]:
    """The body that `path` takes, each time with one wrong value."""
    for name, values in wrong.items():
        for value in values:
            yield post(path, {**BASES[path], name: value})


NO_NUMBERS: tuple[object, ...] = ("x", [], {}, [1], {"a": 1}, "1e3")
NO_TEXTS: tuple[object, ...] = (1, [], {}, [1], True)
NO_LISTS: tuple[object, ...] = (1, "x", {}, {"a": 1}, True)
NO_OBJECTS: tuple[object, ...] = (1, "x", [1], True)
NO_IDS = ("", "a b", "a/b", "x" * 129, "\x00", "ü", "../x", "a\nb")
SCHEMAS = (
    "x",
    [],
    {"type": "x"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": 1},
)
SAMPLING = {
    "temperature": (*NO_NUMBERS, -1),
    "top_p": (*NO_NUMBERS, -0.1, 1.1),
    "frequency_penalty": (*NO_NUMBERS, 1e6),
    "presence_penalty": (*NO_NUMBERS, -1e6),
}
NATIVE_SAMPLING = {
    "max_new_tokens": ("x", [], FAR),
    "temperature": ("x", [], 1e300),
    "top_k": ("x", [], 0.5),
    "stop": (1, {}, [1], [[]], ["x"] * 1000),
    "stop_token_ids": ("x", [-1], [FAR], ["x"], [0.5]),
    "n": ("x", 0, 2, FAR),
    "min_new_tokens": ("x", FAR),
    "regex": (1, [], "x" * 10**6),
    "json_schema": (1, [1], "x" * 10**6),
    "logit_bias": (1, [1], {"x": 1}, {"-1": 1}, {"1": "x"}),
    "custom_params": (1, [1]),
}


def native_sampling(path: str, base: dict[str, Any] | None = None) -> Iterator[Hostile]:
    """SGLang's own parameters, each wrong once."""
    yield from fields(path, sampling_params=NO_OBJECTS)
    for name, values in NATIVE_SAMPLING.items():
        for value in values:
            yield post(path, {**(base or BASES[path]), "sampling_params": {name: value}})


def chats() -> Iterator[Hostile]:
    """Chat completions."""
    yield from fields(
        CHAT,
        model=(1, {}, [1], "", "none", ["small", "none"], None, [[]], "small\x00"),
        messages=(
            *(
                None,
                [],
                {},
                "x",
                1,
                [1],
                [None],
                [[]],
                [{}],
                [{"role": 1}],
                [{"role": "x", "content": "y"}],
            ),
            *(
                [{"role": "user"}],
                [{"role": "user", "content": 1}],
                [{"role": "user", "content": [1]}],
            ),
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            [{"role": "assistant", "content": "x"}],
            [*USER, {"role": "tool", "content": "x", "tool_call_id": "none"}],
            [*USER, {"role": "assistant", "tool_calls": [1]}, *USER],
            [*USER, {"role": "assistant", "tool_calls": [{"id": 1}]}, *USER],
        ),
        max_tokens=(*NO_NUMBERS, 0, -1, FAR, 0.5),
        seed=("x", [], {}),
        stop=(1, {}, [1], [[]], ["x"] * 1000),
        stop_token_ids=NO_LISTS,
        logit_bias=("x", [1], {"x": 1}, {"1": "x"}),
        response_format=SCHEMAS,
        tools=(
            *NO_LISTS,
            [1],
            [{}],
            [{"type": 1}],
            [{"type": "function"}],
            [{"type": "function", "function": 1}],
        ),
        tool_choice=(1, "x", [1], {"type": "x"}),
        stream=("x", 1, [], {}),
        stream_options=NO_OBJECTS,
        metadata=(*NO_OBJECTS, {"a": 1}),
        prediction=(*NO_OBJECTS, {"type": "x"}, {"type": "content", "content": 1}),
        chat_template_kwargs=NO_OBJECTS,
        max_thinking_tokens=(0, -1, "x", FAR),
        program=(*NO_IDS[:4], 1, []),
        lazy=("x", 1, []),
        modalities=(["audio"], "x"),
        functions=([{"name": "x"}],),
        topology=(
            *(
                1,
                "x",
                [1],
                {"name": "x"},
                {"name": "x", "agents": 1},
                {"name": "x", "agents": {"a": {"model": "none"}}},
            ),
            {"name": "x", "agents": {"a": {"model": "small", "precursors": ["a"]}}},
            {"name": "x", "agents": {"a": {"model": "small", "precursors": ["b"]}}},
            {"name": "x", "agents": {f"a{n}": {"model": "small"} for n in range(3000)}},
            {"name": "x", "tree": {"shape": [10**9, 1], "models": ["small"]}},
            {"name": "x", "tree": {"shape": [9, 1], "models": ["small"]}},
        ),
        judge=(1, ["none"], {"model": "none"}, {"model": "small", "odd": 1}),
        plugins=(1, [1], [{}], [{"id": "x"}], [{"id": "fusion"}] * 2),
        fusion=(1, {"models": "x"}, {"models": ["none"]}, {"models": ["small"] * 33}),
        **SAMPLING,
    )


def agents() -> Iterator[Hostile]:
    """Agent requests."""
    yield from fields(
        AGENT,
        program=(*NO_IDS, *NO_TEXTS),
        agent=(*NO_IDS, *NO_TEXTS),
        model=(1, {}, [1], "none", "", None),
        prompt=(
            None,
            1,
            {},
            [],
            [1],
            [[]],
            [{}],
            [{"output_of": ""}],
            [{"output_of": 1}],
            [{"text": 1}],
            [{"x": 1}],
        ),
        messages=(USER, [1], [{"role": "tool", "content": "x"}]),
        wait_s=("x", -1, 1e12, [], True),
        timeout_s=("x", 0, -1, 1e12, []),
        prefill=(
            *NO_OBJECTS,
            {"x": 1},
            {"chunk_tokens": 0},
            {"chunk_tokens": "x"},
            {"incremental": "x"},
        ),
        stream=("x", 1),
        chat_template_kwargs=({"a": 1},),
        **SAMPLING,
    )
    yield from native_sampling(AGENT)
    topology = {"program": "p", "agent": "t", "model": "duo", "messages": USER}
    yield from native_sampling(AGENT, topology)
    yield post(
        AGENT, {**topology, "messages": [{"role": "user", "content": [{"output_of": "t"}]}]}
    )  # itself
    yield post(AGENT, {**BASES[AGENT], "prompt": [{"output_of": "a"}]})  # itself


def inline_topology(where: str, sampling: dict[str, Any]) -> Hostile:
    """A chat with a topology of its own, which has `sampling` at its first agent, its last, all of
    them or a step.
    """
    at: dict[str, dict[str, Any]] = {name: {} for name in ("first", "last", "all")}
    at[where] = {"sampling": sampling}
    agents = {"first": at["first"], "last": {**at["last"], "precursors": ["first"]}}
    topology = (
        {"agents": agents} if where != "step" else {"start": "first", "steps": {"first": at[where]}}
    )
    defaults = {"model": "small", **at["all"]}
    return post(
        CHAT, {"messages": USER, "topology": {"name": "x", "defaults": defaults, **topology}}
    )


def inline_topologies() -> Iterator[Hostile]:
    """Each with one wrong parameter."""
    wrong = [{name: value} for name, values in NATIVE_SAMPLING.items() for value in values]
    for sampling in (
        *wrong,
        {"stop_token_ids": [2**31 - 1], "min_new_tokens": 2},
        {"custom_params": {"__sglang": 1}},
    ):
        yield from (inline_topology(where, sampling) for where in ("first", "last", "all", "step"))


def natives(path: str) -> Iterator[Hostile]:
    """SGLang's own requests."""
    base = {name: value for name, value in BASES[path].items() if name not in ("text", "input_ids")}
    for wrong in (
        {},
        *({"text": value} for value in (1, {}, True, [1], [])),
        *(
            {"input_ids": value}
            for value in ("x", {}, [-1], [FAR], ["x"], [0.5], [[1], [-1]], [[[1]]])
        ),
    ):
        yield post(path, {**base, **wrong})
    yield from native_sampling(path)
    yield post(path, BASES[path], **{"x-model": "none"})


def others() -> Iterator[Hostile]:
    """Responses, messages, embeddings, batches, completions of prompts, and keys of kept runs."""
    yield from fields(
        MESSAGES,
        model=(1, "none", [], None),
        messages=(
            None,
            1,
            {},
            [],
            [1],
            [{}],
            [{"role": "x", "content": "y"}],
            [{"role": "user", "content": 1}],
        ),
        max_tokens=("x", 0, -1, FAR, []),
        system=(1, {}, [1]),
        stop_sequences=(1, "x", [1]),
        tools=(*NO_LISTS, [1], [{}]),
        stream=("x", 1),
    )
    yield from fields(
        EMBEDDINGS, model=(1, [], None, "none"), input=(None, 1, {}, [], [1], [""], ["x"] * 2000)
    )
    for key in ("", "a b", "\u00fc", "x" * 300, "unkept"):
        yield post(CHAT, BASES[CHAT], **{"Idempotency-Key": key})
    yield from fields(
        RESPONSES,
        model=(1, "none", [], None),
        input=(None, 1, {}, [1], [{}], [{"role": "x", "content": "y"}], [{"type": "x"}], []),
        instructions=NO_TEXTS,
        tools=(*NO_LISTS, [1], [{"type": 1}]),
        max_output_tokens=("x", 0, -1, FAR),
        text=(1, "x", {"format": {"type": "x"}}),
        temperature=NO_NUMBERS,
        stream=("x", 1),
    )
    yield from fields(
        BATCHES,
        input_file_id=(*NO_TEXTS, None, "../x", "x" * 10**5),
        endpoint=(*NO_TEXTS, "/v1/embeddings", None),
        completion_window=(*NO_TEXTS, "", "0h", "-1h", "24", "99999h", "24h\n"),
        metadata=(1, "x", [1], {"a": 1}),
    )
    for prompt in (None, 1, "", [[1]]):
        yield post(COMPLETIONS, {"model": "small", "prompt": prompt})


def bodies() -> Iterator[Hostile]:
    """Bodies that are no JSON objects, on every route that takes some."""
    texts = (
        b"",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"{",
        b'{"a":1}x',
        b"\xff\xfe",
        b"{'a':1}",
        b'{"model":NaN}',
    )
    odd = (
        b'{"model":"\\ud800"}',
        b'{"model":1e999}',
        b"\xef\xbb\xbf{}",
        b"[" * 10_000,
        b"\x00",
        b'{"a":"\x01"}',
    )
    for path in (
        CHAT,
        AGENT,
        GENERATE,
        PREFILL,
        RESPONSES,
        COMPLETIONS,
        BATCHES,
        MESSAGES,
        EMBEDDINGS,
    ):
        yield from (post(path, text) for text in (*texts, *odd))
    yield from (Hostile("PUT", "/v1/topologies/x", text) for text in texts)


def crowds() -> Iterator[Hostile]:
    """Bodies of so many values that to parse them would hold up the event loop."""
    many = (b"[]", b"{}", b'""', b'"x"', b'{"role":"user","content":"x"}', b'"\\\\"', b'"\\"["')
    for path in (CHAT, AGENT, GENERATE, PREFILL, RESPONSES, MESSAGES, COMPLETIONS, EMBEDDINGS):
        yield from (post(path, b'{"odd":[%s]}' % b",".join([one] * 60_000)) for one in many)
    yield post(GENERATE, b'{"input_ids":[1%s]}' % (b",1" * 1_000_001))


def encodings() -> Iterator[Hostile]:
    """Bodies that are not what their headers say, or grow when they are unpacked."""
    bomb = b'{"model":"' + b"x" * 50_000_000 + b'"}'
    for name, packed in (("gzip", gzip.compress(bomb)), ("deflate", zlib.compress(bomb))):
        yield post(CHAT, packed, **{"Content-Encoding": name})
        yield post(CHAT, b"nonsense", **{"Content-Encoding": name})
    yield post(CHAT, b"{}", **{"Content-Encoding": "odd"})
    for kind in (
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 500,
        "text/plain",
        "x",
    ):
        yield post(FILES, b"--x--", **{"Content-Type": kind})


NAMES = (
    "%00",
    "%ff",
    "%0d%0aX:y",
    "..%2f..%2fx",
    "%2e%2e",
    "x" * 3000,
    "%e2%80%ae",
    "{}",
    "%27--",
    "none",
    "%25s",
)


def paths() -> Iterator[Hostile]:
    """Names in paths that are known to none, or out of all bounds."""
    for name in NAMES:
        for path in (
            "models",
            "files",
            "batches",
            "traces",
            "agent/requests",
            "agent/outputs",
            "topologies",
        ):
            yield Hostile("GET", f"/v1/{path}/{name}")
        yield Hostile("GET", f"/v1/files/{name}/content")
        yield Hostile("DELETE", f"/v1/files/{name}")
        yield Hostile("DELETE", f"/v1/topologies/{name}")
        yield Hostile("POST", f"/v1/batches/{name}/cancel", b"{}")
        yield Hostile("PUT", f"/v1/agent/outputs/{name}%20/{name}", b"x")
    for query in (
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=1e9",
        "limit=" + "9" * 5000,
        "after=none",
        "order=x",
    ):
        yield Hostile("GET", f"{FILES}?{query}")
    yield from (
        Hostile("GET", path)
        for path in ("/v1", "/v1/", "/admin", "/v1/chat", "/.git/config", "/v1/models/")
    )
    yield from (Hostile(method, CHAT) for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"))


def markers() -> Iterator[Hostile]:
    """Markers of lazy answers that are altered, or none of the client's."""
    known = "0123456789abcdef0123456789abcdef"
    for wrong in (
        f"[[lazyanswer:{known}]]",
        "[[lazyanswer:]]",
        f"[[lazyanswer:{known}",
        f"lazyanswer {known}",
    ):
        said = [{"role": "user", "content": f"Judge {wrong}"}]
        for model in ("small", "duo"):
            yield post(CHAT, {"model": model, "messages": said})
            yield post(RESPONSES, {"model": model, "input": said})
            yield post(MESSAGES, {"model": model, "max_tokens": 5, "messages": said})
        yield post(AGENT, {**BASES[AGENT], "prompt": wrong})


def schemas() -> Iterator[Hostile]:
    """Forms of answers that are none."""
    forms = (
        *SCHEMAS,
        *(
            {"type": "json_schema", "json_schema": wrong}
            for wrong in ({}, [], {"schema": 1}, {"schema": DEEP})
        ),
        *({"type": wrong} for wrong in (1, None, "yaml")),
    )
    for model in ("small", "duo"):
        for wrong in forms:
            yield post(CHAT, {"model": model, "messages": USER, "response_format": wrong})
        yield post(CHAT, {"model": model, "messages": USER, "json_schema": DEEP})
        yield post(
            RESPONSES, {"model": model, "input": "Hi", "text": {"format": {"type": "json_schema"}}}
        )


DEEP: Any = {}
for _ in range(200):
    DEEP = {"not": DEEP}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "dry"}


def calling(*calls: object) -> dict[str, Any]:
    """An assistant's message with these calls of tools."""
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def tool_messages() -> Iterator[Hostile]:
    """Calls of tools that no model has written, and results that answer none."""
    functions = (1, {}, *({"name": name, "arguments": "{}"} for name in (1, "", "a b", "x" * 129)))
    arguments = (1, [], None, DEEP)
    wrong_calls = (
        *(1, "x", {}, {"id": "c"}),
        *({**CALL, "id": wrong} for wrong in (None, "", 1, "x" * 129)),
        *({**CALL, "type": wrong} for wrong in ("custom", 1)),
        *({**CALL, "function": wrong} for wrong in functions),
        *({**CALL, "function": {"name": "f", "arguments": wrong}} for wrong in arguments),
    )
    wrong_results = (
        *({**RESULT, "tool_call_id": wrong} for wrong in (None, "", 1, "other", "x" * 129)),
        *({**RESULT, "content": wrong} for wrong in (None, 1, {}, [1], [{"type": "image_url"}])),
        {**RESULT, "role": "function"},
    )
    for said in (
        *([calling(call), RESULT] for call in wrong_calls),
        *([calling(CALL), result] for result in wrong_results),
        *([RESULT], [calling(CALL)], [RESULT, calling(CALL)], [calling(CALL), RESULT, RESULT]),
        [calling(*[CALL] * 129), RESULT],
    ):
        yield post(CHAT, {"model": "duo", "messages": [*USER, *said]})


MALFORMED: dict[str, tuple[Hostile, ...]] = {
    "markers": tuple(markers()),
    "schemas": tuple(schemas()),
    "tool messages": tuple(tool_messages()),
    "parameters of inline topologies": tuple(inline_topologies()),
}
"""Each is a 400 that names its field."""

FAMILIES: dict[str, tuple[Hostile, ...]] = {
    **MALFORMED,
    "chats": tuple(chats()),
    "agent requests": tuple(agents()),
    "generate": tuple(natives(GENERATE)),
    "prefill-only": tuple(natives(PREFILL)),
    "responses, batches, completions": tuple(others()),
    "bodies that are no JSON objects": tuple(bodies()),
    "crowds of values": tuple(crowds()),
    "encodings": tuple(encodings()),
    "paths and queries": tuple(paths()),
}

KEY = b"Authorization: Bearer sk-a\r\n"
HEADS: tuple[bytes, ...] = (
    b"\r\n\r\n\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / SSH/1.0\r\n\r\n",
    b"POST /generate HTTP/1.1\nHost: x\n\n",
    b"POST  /generate  HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"x" * 20_000 + b": y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    + b"".join(b"x%d: y\r\n" % n for n in range(5000))
    + b"\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx\x00y: z\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx : z\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    *(
        b"POST /generate HTTP/1.1\r\nHost: x\r\n" + KEY + framing + b"\r\n\r\n"
        for framing in (
            b"Content-Length: -1",
            b"Content-Length: x",
            b"Content-Length: 1e3",
            b"Content-Length: " + b"9" * 5000,
            b"Content-Length: 2\r\nContent-Length: 3",
            b"Content-Length: 2\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked, identity",
            b"Transfer-Encoding: odd",
            b"Transfer-Encoding: chunked\r\n\r\nzz",
            b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff",
            b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 20_000,
            b"Expect: 200-maybe\r\nContent-Length: 2",
            b"Content-Length: 2\r\nHost: y",
        )
    ),
    b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    + b"x" * 8000
    + b"\r\nContent-Length: 2\r\n\r\n{}",
    (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Basic YTpi\r\nContent-Length: "
        b"2\r\n\r\n{}"
    ),
)
"""What no HTTP client sends; a 4xx, or the end of the connection."""
