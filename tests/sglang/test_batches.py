"""Several prompts in one native body, which only SGLang takes."""

import orjson
import pytest

from shell_router.engines.sglang import SglangPair
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

PROMPTS = [[30 + at for at in range(40)], [90 + at for at in range(60)]]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_output_of_a_relayed_batch_holds_its_own_prompts_log_probabilities(
    pair: SglangPair, stream: bool
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": sampling, "stream": stream}
    asked = orjson.dumps({**body, "return_logprob": True, "logprob_start_len": 0})
    async with pair.forward("generate", asked) as answer:
        relayed = b"".join([chunk async for chunk in answer.chunks])
    if stream:
        events = [line[6:] for line in relayed.split(b"\n") if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]"
        outputs = [(event["index"], event) for event in map(orjson.loads, events)]
    else:
        outputs = list(enumerate(orjson.loads(relayed)))
    assert {index for index, _ in outputs} == {0, 1}
    for index, output in outputs:
        assert [token for _, token, _ in output["meta_info"]["input_token_logprobs"]] == PROMPTS[
            index
        ]
