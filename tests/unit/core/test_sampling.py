"""Sampling parameters that would end, hang or slow an engine are refused by name, on whatever way
they come.
"""

import orjson
import pytest

from shell_router.core.engine import ServedModel
from shell_router.core.exact_json import write_json
from shell_router.core.json_schema import move_schema
from shell_router.core.sampling import check_depth, check_sampling
from shell_router.engines.native_body import read_native
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
        {"is_normalized": True, "stop_regex_strs": ["(a+)+$"]},
        {"stop_regex_strs": ["(a+)+$"]},
        {"stop_strs": ["x" * 9999]},
        {"stop_str_max_len": 2**40},
        {"stop_regex_max_len": "x"},
        {"ebnf_full_assistant": True},
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


def schema_of(optional: int, **fields: object) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{at}": {} for at in range(optional)}, **fields}


@pytest.mark.parametrize(
    "schema",
    [
        schema_of(182),
        schema_of(5000),
        schema_of(182, required=[f"q{at}" for at in range(5000)]),
        schema_of(182, required={"p1": 1}),
        {"anyOf": [schema_of(100) for _ in range(4)]},
        {"$defs": {"a": {"items": [schema_of(182)]}}},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_schemas_that_engines_compile_for_long_are_refused(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidField, match="optional properties"):
        check_depth(schema, "response_format")
    for name in ("json_schema", "structural_tag"):
        with pytest.raises(InvalidField, match="optional properties"):
            check_sampling({name: orjson.dumps(schema).decode()})


@pytest.mark.parametrize(
    "schema",
    [
        schema_of(181),
        schema_of(5000, required=[1, {}, *(f"p{at}" for at in range(5000))]),
        {"tools": [schema_of(16)] * 128},
        {"properties": [1] * 999},
    ],
    ids=lambda schema: str(schema)[:30],
)
def test_schemas_that_engines_compile_soon_are_taken(schema: dict[str, object]) -> None:
    check_depth(schema, "response_format")
    check_sampling({"json_schema": orjson.dumps(schema).decode()})


SELF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": ""},
        {"$defs": {"a": SELF}, **SELF},
        {"$defs": {"a": SELF}, "type": "object", "properties": {"x": SELF}},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [SELF]}}, "items": SELF},
        {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
        {"oneOf": [{"anyOf": [{"$ref": "#"}]}]},
        {"$defs": {"a": {"$anchor": "x", "$ref": "#x"}}},
        {"$defs": {"a": {"$ref": "#/%24defs/a"}}},
        {"$id": "http://a/b", "$defs": {"a": {"$ref": "http://a/b#/$defs/a"}}},
    ],
    ids=str,
)
def test_a_schema_that_is_itself_by_references_alone_is_refused(schema: dict[str, object]) -> None:
    text = orjson.dumps(schema).decode()
    with pytest.raises(InvalidField, match="itself alone"):
        check_sampling({"json_schema": text})
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for name, fields in (("response_format", format_), ("tools", tools)):
        body = orjson.dumps({"messages": [], name: fields})
        with pytest.raises(InvalidField, match=rf"^{name}.* must hold .*itself alone"):
            read_native(body, "rid", route="v1/chat/completions")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"$defs": {"a": {"items": SELF}}, **SELF},
        {"$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": SELF}]}}, **SELF},
        {"$defs": {"a": {"type": "string"}}, "anyOf": [SELF, SELF]},
        {"properties": {"$ref": {"type": "string"}}},
        {"enum": [{"$ref": 1}]},
    ],
    ids=str,
)
def test_a_schema_that_refers_to_itself_inside_is_taken(schema: dict[str, object]) -> None:
    check_sampling({"json_schema": orjson.dumps(schema).decode()})


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


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a" * 2000: {"anyOf": [{}] * 1000}}},
        {"$id": "http://a" + "/b" * 1000, "anyOf": [{"$ref": "c"}] * 1000},
        {"$id": "http://a/" + "b" * 900 + "/", "$defs": {"a" * 200: SELF}},
    ],
    ids=["a name", "an $id", "both"],
)
def test_a_schema_of_long_names_is_refused_as_each_part_would_repeat_them(
    schema: dict[str, object],
) -> None:
    with pytest.raises(InvalidField, match="short names"):
        check_sampling({"json_schema": orjson.dumps(schema).decode()})
    with pytest.raises(InvalidField, match="Shorten"):
        move_schema(schema, "#/$defs/f")


def test_a_schema_takes_integers_beyond_64_bits_on_an_engines_own_route() -> None:
    schema = {"type": "integer", "maximum": 2**70}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    read_native(
        write_json({"messages": [], "response_format": format_}),
        "rid",
        route="v1/chat/completions",
    )


@pytest.mark.parametrize(
    ("schema", "is_taken"),
    [
        ({"enum": [2**63 - 1, -(2**63) + 1, "x"]}, True),
        ({"properties": {"enum": {"const": 5}, "const": {"maximum": 2**70}}}, True),
        ({"enum": ["x", 2**70]}, False),
        ({"items": {"const": -(2**70)}}, False),
        ({"$defs": {"a": {"anyOf": [{"enum": [2**64]}]}}}, False),
    ],
)
def test_numbers_that_engines_would_write_as_others_are_refused(
    schema: dict[str, object], is_taken: bool
) -> None:
    sampling = {"json_schema": write_json(schema).decode()}
    if is_taken:
        check_sampling(sampling)
        return
    with pytest.raises(InvalidField, match="64 bits"):
        check_sampling(sampling)
