"""One tenant's odd request on real SGLang: it gets an answer or a refusal, and another tenant's
requests are served meanwhile.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from shell_router.core.engine import Generation, Hints
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.errors import EngineRejected, InvalidRequest
from tests.fakes.scripted_pair import collect

pytestmark = pytest.mark.sglang

LIMIT_S = 20.0
"""How long a request may take: a server that restarts, or is blocked, takes longer."""
LOGPROBS = {"return_logprob": True}
OPTIONAL = {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(5000)}}
SELF = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "a list of tops": {**LOGPROBS, "top_logprobs_num": [1]},
    "a list of starts": {**LOGPROBS, "logprob_start_len": [0]},
    "a list of flags": {"return_logprob": [True]},
    "ids of several": {**LOGPROBS, "token_ids_logprob": [[1]]},
    "no ids": {**LOGPROBS, "token_ids_logprob": []},
    "many tops": {**LOGPROBS, "top_logprobs_num": 128},
    "a late start": {**LOGPROBS, "logprob_start_len": 2**31 - 1},
    "a list of sampling": {"sampling_params": [{}]},
    "a broken stop": {"sampling_params": {"stop_regex": "("}},
    "a stop that goes back": {"sampling_params": {"stop_regex": "(a|b|.)*(a|b|.)*(a|.)*$^"}},
    "a costly stop": {"sampling_params": {"stop_regex": ".{0,60}~"}},
    "optional properties": {"sampling_params": {"json_schema": orjson.dumps(OPTIONAL).decode()}},
    "a schema of itself": {"sampling_params": {"json_schema": orjson.dumps(SELF).decode()}},
    "a schema of itself alone": {"sampling_params": {"json_schema": '{"$ref": "#"}'}},
    "a left recursion": {"sampling_params": {"ebnf": 'root ::= root "a" | "b"'}},
    "an ambiguous grammar": {"sampling_params": {"ebnf": 'root ::= root root | [a-z] | ""'}},
    "a broken grammar": {"sampling_params": {"ebnf": "root ::= nope"}},
    "a broken pattern": {"sampling_params": {"regex": "("}},
    "a grammar of many options": {"sampling_params": {"ebnf": "root ::= " + '"a"? ' * 2000}},
    "nested repeats": {"sampling_params": {"regex": "(([a-z]{0,9}){0,9}){0,9}"}},
    "nested stars": {"sampling_params": {"regex": "(([a-z]*)*)*"}},
    "a long repeat": {"sampling_params": {"regex": "(.{0,999}){0,999}"}},
}


async def send(pair: SglangPair, body: Mapping[str, Any]) -> str:
    params = body.get("sampling_params", {})
    if isinstance(params, dict):
        params = {"max_new_tokens": 64, "ignore_eos": True, **params}
    sent = {"input_ids": [*range(20, 40)], **body, "sampling_params": params}
    try:
        async with pair.forward("generate", orjson.dumps(sent), hints=Hints(user="alice")) as reply:
            answer = b"".join([chunk async for chunk in reply.chunks])
    except InvalidRequest:
        return "refused here"
    except EngineRejected as refusal:
        return f"refused there with {refusal.status}"
    return f"{reply.status}: {answer[:200]!r}"


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
async def test_another_tenant_does_not_notice_an_odd_request(
    pair: SglangPair, body: Mapping[str, Any]
) -> None:
    odd = asyncio.create_task(send(pair, body))
    try:
        for _ in range(4):
            asked = Generation(
                random_rid(), [*range(50, 60)], {"max_new_tokens": 8}, hints=Hints(user="bob")
            )
            async with asyncio.timeout(LIMIT_S):
                await collect(pair, asked)
        async with asyncio.timeout(LIMIT_S):
            outcome = await odd
    finally:
        odd.cancel()
    assert outcome == "refused here" or outcome.startswith(("200", "400", "refused there with 4"))
