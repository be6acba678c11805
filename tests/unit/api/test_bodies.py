"""Fields that are missing, wrong or not served, by the kind of body: each is named by its path."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from shell_router.api import messages, response_translation
from shell_router.api.agents import AGENT, read_agent
from shell_router.api.bodies import find_ignored, read_chat, read_models
from shell_router.api.embeddings import EMBEDDINGS, MAX_CHARACTERS, MAX_TEXTS
from shell_router.api.engine_chat import COMPLETION, read_completion, read_engine_chat
from shell_router.api.fields import CHAT
from shell_router.api.views import ENGINES
from shell_router.core.engine import ChatServing
from shell_router.engines.native_body import NativeRules, read_native
from shell_router.errors import InvalidField

Sent = Mapping[str, Any]
USER = {"role": "user", "content": "Hello"}
RAIN = {"role": "user", "content": "Rain?"}
QUESTION = {"role": "user", "content": "What is the weather?"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RULES = NativeRules(vocabulary=1000)


def deep(levels: int) -> dict[str, Any]:
    return {"of": deep(levels - 1)} if levels else {}


def function(**fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **fields}}


def image(source: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


def calling(call: object) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}


def chat(sent: Sent) -> None:
    body = CHAT.read(sent)
    read_models(body)
    read_chat(body, sent, "run", "me", 60.0)
    find_ignored(body, sent, is_panel=False)


def engine_chat(sent: Sent) -> None:
    bodies = read_engine_chat(CHAT.read(sent), sent, "small", ChatServing(tool_parser="x"))
    read_native(bodies[0], "rid", RULES, route="v1/chat/completions")


def completion(sent: Sent) -> None:
    bodies = read_completion(COMPLETION.read(sent), sent, "small")
    read_native(bodies[0], "rid", RULES, route="v1/completions")


def message(sent: Sent) -> None:
    body = messages.MESSAGES.read(sent)
    messages.MESSAGES.find_unknown(sent)
    chat(messages.as_chat(body)[0])


def response(sent: Sent) -> None:
    _, translated, _ = response_translation.as_chat(sent)
    response_translation.RESPONSE.find_unknown(sent)
    chat(translated)


def agent(sent: Sent) -> None:
    read_agent(AGENT.read(sent), "me", 600.0)
    AGENT.find_unknown(sent)


SAMPLING: list[tuple[Sent, str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"seed": 2**64}, "seed"),
    ({"regex": "a", "json_schema": "{}"}, "json_schema"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
]

CHATS: list[tuple[Sent, str]] = [
    ({"user": 3}, "user"),
    ({"prompt_cache_key": ["a"], "user": "a"}, "prompt_cache_key"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 3}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hello"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [USER, {"role": "tool", "content": "Hello", "tool_call_id": "c"}]},
        "messages[1].tool_call_id",
    ),
    ({"messages": [{"role": "function", "content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "messages[1].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"stream": "yes"}, "stream"),
    ({"include_agents": 1}, "include_agents"),
    ({"stream_options": True}, "stream_options"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"n": 17}, "n"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"style": "x" * 2**14}}, "chat_template_kwargs"),
    ({"max_thinking_tokens": 0}, "max_thinking_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logprobs": True}, "logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"audio": {}}, "audio"),
    ({"top_a": 0.1}, "top_a"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"temperature": -1}, "temperature"),
    ({"temprature": 1}, "temprature"),
    ({"max_new_tokens": 1}, "max_new_tokens"),
    ({"stream_option": {}}, "stream_option"),
    ({"prediction": "text"}, "prediction"),
    ({"prediction": {"content": "text"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
]

TOOLS: list[tuple[Sent, str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name"),
    ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters"),
    ({"tools": [function(parameters=deep(300))]}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [function(name=f"f{at}") for at in range(129)]}, "tools"),
    ({"tools": [function(description="x" * 2**18)]}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": function(name="other")}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]

CALLS: list[tuple[Sent, str]] = [
    (calling({**CALL, "id": ""}), "messages[1].tool_calls[0].id"),
    (calling({**CALL, "type": "custom"}), "messages[1].tool_calls[0].type"),
    (
        calling({"id": "1", "function": {"arguments": "{}"}}),
        "messages[1].tool_calls[0].function.name",
    ),
]

AGENTS: list[tuple[Sent, str]] = [
    ({"program": None}, "program"),
    ({"program": "a b"}, "program"),
    ({"agent": "a/b"}, "agent"),
    ({"agent": "x" * 129}, "agent"),
    ({"model": None}, "model"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [5]}, "prompt[0]"),
    ({"prompt": [{}]}, "prompt[0]"),
    ({"prompt": [{"text": "a", "output_of": "b"}]}, "prompt[0]"),
    ({"prompt": ["a", {"output_of": "no spaces"}]}, "prompt[1].output_of"),
    ({"prompt": None, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {"prompt": None, "messages": [{"role": "user", "content": [1]}]},
        "messages[0].content[0]",
    ),
    ({"timeout_s": 601}, "timeout_s"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"wait_s": -1}, "wait_s"),
    ({"sampling_params": {}, "temperature": 0}, "sampling_params"),
    ({"sampling_params": []}, "sampling_params"),
    ({"prefill": {"chunk": 5}}, "prefill.chunk"),
    ({"prefill": {"chunk_tokens": "big"}}, "prefill.chunk_tokens"),
    ({"prefill": {"min_tokens": 9, "max_tokens": 3}}, "prefill.min_tokens"),
    ({"prefill": {"slot_order": "random"}}, "prefill.slot_order"),
    ({"prefill": {"incremental": "no"}}, "prefill.incremental"),
    ({"stream": 1}, "stream"),
]

MESSAGES: list[tuple[Sent, str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_token": 3}, "max_token"),
    ({"temprature": 1}, "temprature"),
    ({"messages": []}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}
            ]
        },
        "messages[0].content[0].source.type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [RAIN, {"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "messages[1].content[0].name",
    ),
    ({"messages": [RAIN, {"role": "assistant", "content": "Well"}]}, "messages[1].role"),
    ({"messages": [{"role": "developer", "content": "x"}, RAIN]}, "messages[0].role"),
    (image({"type": "file", "file_id": "f"}), "messages[0].content[0].source.type"),
    (image({"type": "base64", "data": "AAAA"}), "messages[0].content[0].source.media_type"),
    (
        image({"type": "base64", "media_type": "image/png"}),
        "messages[0].content[0].source.data",
    ),
    (image({"type": "url"}), "messages[0].content[0].source.url"),
    (image(None), "messages[0].content[0].source"),
    ({"thinking": {"type": "enabled"}, "chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "no spaces"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"output_config": {"format": {"type": "xml"}}}, "response_format.type"),
]

RESPONSES: list[tuple[Sent, str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        "input[0].call_id",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_token": 5}, "max_output_token"),
    ({"temprature": 1}, "temprature"),
    ({"programm": "p"}, "programm"),
    ({"instructions": 3}, "instructions"),
    ({"temperature": -1}, "temperature"),
    ({"text": {"format": {"type": "xml"}}}, "response_format.type"),
    ({"stream": "yes"}, "stream"),
    *[({name: deep(300)}, name) for name in ("text", "reasoning", "user", "metadata")],
]

ENGINE_CHATS: list[tuple[Sent, str]] = [
    ({"tools": "weather"}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
        "tools[0].function.name",
    ),
    ({"tools": [WEATHER], "tool_choice": "weather"}, "tool_choice"),
    ({"tools": [WEATHER], "messages": []}, "messages"),
    ({"tools": [WEATHER], "messages": [3]}, "messages[0]"),
    ({"tools": [WEATHER], "messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"tools": [WEATHER], "messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {"tools": [WEATHER], "messages": [{"role": "user", "content": [3]}]},
        "messages[0].content[0]",
    ),
    (
        {"tools": [WEATHER], "messages": [{"role": "user", "content": [{}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
        "messages[0].tool_call_id",
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]},
        "messages[1].role",
    ),
    (
        {"tools": [WEATHER], "messages": [{"role": "system", "content": "x", "tools": [WEATHER]}]},
        "messages[0].tools",
    ),
    ({"n": 1, "logprobs": True, "logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logprobs": True, "stop": ["x"] * 33}, "stop"),
    ({"logprobs": True, "stop_token_ids": [1000]}, "stop_token_ids"),
    ({"logprobs": True, "custom_params": {"__sglang": 1}}, "custom_params"),
    ({"chat_template_kwargs": deep(70)}, "chat_template_kwargs"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"n": 2, "temperature": -1}, "temperature"),
    ({"n": 2, "max_tokens": 0}, "max_tokens"),
    ({"n": 2, "functions": [{}]}, "functions"),
    ({"n": 2, "include_agents": True}, "include_agents"),
    ({"n": 2, "max_thinking_tokens": 100}, "max_thinking_tokens"),
    ({"n": 2, "top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"chat_template_kwargs": "thinking"}, "chat_template_kwargs"),
    ({"n": 2, "stream": 1}, "stream"),
    ({"n": 2, "temprature": 1}, "temprature"),
    ({"n": 2, "rid": "0" * 32}, "rid"),
    ({"logprobs": True, "rid": ["0" * 32]}, "rid"),
    ({"logprobs": True, "disagg_prefill_dp_rank": 9}, "disagg_prefill_dp_rank"),
    ({"tool": [WEATHER]}, "tool"),
]

COMPLETIONS: list[tuple[Sent, str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "y"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"top_pp": 1}, "top_pp"),
    ({"top_a": 0.1}, "top_a"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]

EMBEDDED: list[tuple[Sent, str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [1, 2]}, "input[0]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
    ({"input": ["a", "x" * (MAX_CHARACTERS + 1)]}, "input[1]"),
    ({"encoding_format": "int8"}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"),
    ({"imput": "a"}, "imput"),
]

PAIRS: list[tuple[Sent, str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"pair": "a"}, "pair"),
    ({"pairs": {}}, "pairs"),
]


def embeddings(sent: Sent) -> None:
    EMBEDDINGS.read(sent)
    EMBEDDINGS.find_unknown(sent)


def pair(sent: Sent) -> None:
    ENGINES.read(sent)
    ENGINES.find_unknown(sent)


OF_CHAT: Sent = {"model": "m", "messages": [USER]}
KINDS: Mapping[str, tuple[Callable[[Sent], None], Sent, list[tuple[Sent, str]]]] = {
    "sampling": (chat, OF_CHAT, SAMPLING),
    "chat": (chat, OF_CHAT, CHATS),
    "tools": (chat, {**OF_CHAT, "tools": [WEATHER]}, TOOLS),
    "calls": (chat, OF_CHAT, CALLS),
    "engine chat": (engine_chat, {"model": "small", "messages": [QUESTION]}, ENGINE_CHATS),
    "completion": (completion, {"model": "small", "prompt": "x"}, COMPLETIONS),
    "message": (message, {"model": "small", "max_tokens": 64, "messages": [RAIN]}, MESSAGES),
    "response": (response, {"model": "small", "input": "x"}, RESPONSES),
    "agent": (agent, {"program": "p", "agent": "a", "model": "m", "prompt": "Hello"}, AGENTS),
    "embeddings": (embeddings, {"model": "hash", "input": "x"}, EMBEDDED),
    "pair": (pair, {"model": "small", "pair": {}}, PAIRS),
}
CASES = [
    pytest.param(kind, fields, path, id=f"{kind}-{path}-{at}")
    for kind, (_, _, table) in KINDS.items()
    for at, (fields, path) in enumerate(table)
]


@pytest.mark.parametrize(("kind", "fields", "path"), CASES)
def test_a_wrong_field_is_named_by_its_path(kind: str, fields: Sent, path: str) -> None:
    read, whole, _ = KINDS[kind]
    with pytest.raises(InvalidField) as refused:
        read({**whole, **fields})
    assert refused.value.field == path
    assert path in str(refused.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_without_these_faults_is_read(kind: str) -> None:
    read, whole, _ = KINDS[kind]
    read(whole)
    read({**whole, "temperature": None, "of_the_future": None})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5."),
        ({"temperature": "hot"}, 'temperature must be a number, not "hot".'),
        ({"temperature": "h" * 1000}, "temperature must be a number, not a string."),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, not 0."),
        ({"stop": ["a", 5]}, "stop[1] must be a string, not 5."),
        ({"stop": 5}, "stop must be a string or an array, not 5."),
        ({"ignore_eos": [1]}, "ignore_eos must be true or false, not an array."),
        ({"messages": []}, "messages must be an array that is not empty. Send"),
        ({"temprature": 1}, "temprature is unknown. Did you mean temperature?"),
        (
            {"messages": [{"role": "robot"}]},
            "messages[0].role must be 'system', 'developer', 'user', 'assistant', 'tool', "
            'not "robot".',
        ),
    ],
)
def test_a_refusal_shows_the_value(fields: Sent, message: str) -> None:
    with pytest.raises(InvalidField) as refused:
        chat({**OF_CHAT, **fields})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "fields", "remedy"),
    [
        ("chat", {"messages": []}, "Send at least one user message."),
        ("chat", {"messages": [{}]}, ""),
        ("response", {"input": [{"type": "item_reference"}]}, "function_call_output"),
        ("embeddings", {"input": [1, 2]}, "check_embedding_ctx_length=False"),
    ],
)
def test_a_remedy_belongs_to_the_field_that_is_wrong(kind: str, fields: Sent, remedy: str) -> None:
    read, whole, _ = KINDS[kind]
    with pytest.raises(InvalidField) as refused:
        read({**whole, **fields})
    assert remedy in refused.value.remedy and bool(remedy) == bool(refused.value.remedy)


def test_an_empty_array_is_called_one() -> None:
    with pytest.raises(InvalidField, match=r"input must be .*, not an empty array"):
        response_translation.RESPONSE.read({"model": "m", "input": []})
