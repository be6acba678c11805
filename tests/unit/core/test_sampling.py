"""Sampling parameters that would end, hang or slow an engine are refused by name, on whatever way
they come.
"""

import pytest

from shell_router.core.engine import ServedModel
from shell_router.core.sampling import check_depth, check_sampling
from shell_router.errors import InvalidField
from shell_router.moa.agent import AgentTask, check_task
from tests.fakes.moa import ScriptedMoa

VOCABULARY = 1000


def nested(levels: int) -> object:
    found: object = 1
    for _ in range(levels):
        found = {"a": [found]}
    return found


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCABULARY]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1.0]},
        {"stop_token_ids": [True]},
        {"stop_token_ids": list(range(VOCABULARY)) * 2},
        {"logit_bias": {str(VOCABULARY): 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {"1": 1e300}},
        {"logit_bias": [1]},
        {"stop": ["x"] * 33},
        {"stop": "x" * 257},
        {"stop": [1]},
        {"stop_regex": ["x"] * 33},
        {"n": 2},
        {"n": 0},
        {"n": True},
        {"n": [1]},
        {"beam_width": 4},
        {"top_k": 2**31},
        {"top_k": "1"},
        {"max_new_tokens": 1e9},
        {"temperature": 1e300},
        {"temperature": "hot"},
        {"stream_interval": 0},
        {"stream_interval": "x"},
        {"sampling_seed": 2**63},
        {"ignore_eos": 1},
        {"regex": "x" * 2**15},
        {"ebnf": 1},
        {"json_schema": "[" * 200 + "]" * 200},
        {"json_schema": "[" * 5000 + "]" * 5000},
        {"json_schema": '"%s"' % ("x" * 2**19)},
        {"json_schema": {}},
        {"custom_params": [1]},
        {"custom_params": {"__sglang_reasoning_end_token_ids": [1]}},
        {"custom_params": {"drafts": [[1, VOCABULARY]]}},
        {"custom_params": {"drafts": [["x"]]}},
        {"custom_params": nested(100)},
        {"of_a_later_sglang": "x" * 2**19},
    ],
    ids=lambda params: str(params)[:40],
)
def test_what_would_hurt_an_engine_is_refused_by_name(params: dict[str, object]) -> None:
    with pytest.raises(InvalidField) as refused:
        check_sampling(params, VOCABULARY, "sampling_params")
    assert refused.value.field.startswith("sampling_params") and refused.value.remedy
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "params",
    [
        {},
        {
            "stop_token_ids": [0, VOCABULARY - 1],
            "logit_bias": {"5": -100, "6": 1.5},
            "stop": ["a"] * 32,
            "n": 1,
        },
        {
            "temperature": 0,
            "top_k": -1,
            "max_new_tokens": 5,
            "sampling_seed": -1,
            "stop": None,
            "ignore_eos": False,
        },
        {"json_schema": '{"type": "object"}', "custom_params": {"drafts": [[1], []], "mine": 1}},
        {"json_schema": "$$ANY$$", "of_a_later_sglang": {"x": [1]}},
    ],
)
def test_what_engines_take_passes(params: dict[str, object]) -> None:
    check_sampling(params, VOCABULARY)


def test_depth_is_counted_in_levels() -> None:
    check_depth(nested(32), "schema")
    with pytest.raises(InvalidField, match="64 levels"):
        check_depth(nested(33), "schema")
    with pytest.raises(InvalidField, match="100000 values"):
        check_depth([[1]] * 60_000, "schema")


async def test_every_agent_of_a_run_is_checked_against_its_models_vocabulary() -> None:
    moa = ScriptedMoa()
    model = ServedModel(
        "small", moa.engines["small"], moa.tokenizers["small"], 4096, vocabulary=VOCABULARY
    )
    with pytest.raises(InvalidField, match="below 1000"):
        await check_task(
            AgentTask(
                "a", "r", model, ("x",), {"max_new_tokens": 1, "stop_token_ids": [VOCABULARY]}
            )
        )
