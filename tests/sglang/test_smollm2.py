"""A real small model on real SGLang: tools, thinking and JSON schemas, whole and streamed, alone
and in a tree.

SmolLM2 has a template that knows thinking and tools as Qwen3's does.
"""

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair
from launch.sglang_cpu.smollm2 import smollm2_folder
from shell_router.app import serve_deployment
from shell_router.config import Config, EmbedderSettings, Listen, ModelSettings, PairSettings
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.calls import add_sglang_nulls
from tests.fakes.thinking_model import with_template

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

THINKING_TOKENS = 200
SOME_PENALTY = 1.0
"""Where a schema allows white space, so small a model might write nothing else."""
TREE = f"""
name: tree
agents:
  thinker:
    model: thinker
    max_thinking_tokens: {THINKING_TOKENS}
    sampling: {{max_new_tokens: {THINKING_TOKENS + 16}, ignore_eos: true}}
  plain: {{model: plain}}
  root:
    model: plain
    precursors: [thinker, plain]
    prompt: {{prefix: "Merge them.", suffix: "{{question}}"}}
defaults: {{sampling: {{max_new_tokens: 16, temperature: 0}}}}
"""
ALONE = """
name: thinking-root
agents: {only: {model: thinker, max_thinking_tokens: 12}}
"""
BY_ROUTER = "{name: by-router, agents: {only: {model: plain}}}"
BY_ENGINE = "{name: by-engine, agents: {only: {model: unparsed}}}"
CITY = {"type": "string", "enum": ["Bonn", "Kyoto"]}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "How it is outside.", "parameters": PARAMETERS}
STRICT: Any = [
    {"type": "function", "function": {**FUNCTION, "strict": True}}
]  # else SGLang leaves arguments free
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASKED: Any = [{"role": "user", "content": "How is the weather in Bonn?"}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}


def copied(model: Path, folder: Path) -> Path:
    """The model with links to its weights, so that its template may be another one."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        elif file.name != "chat_template.jinja":
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[CpuPair]:
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {BUILD_COMMAND}")
    model = smollm2_folder(venv)
    plain = with_template(copied(model, folder / "plain"))
    with_template(copied(model, folder / "thinker"), "<think>\n")
    options = ("--tool-call-parser", "qwen25", "--max-total-tokens", "16384")
    with cpu_pair(plain, venv, folder / "logs", options=options) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ai(servers: CpuPair, folder: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    pairs = (
        PairSettings(
            servers.prefill.url, servers.decode.url, servers.bootstrap_port, servers.bootstrap_host
        ),
    )
    models = {
        "plain": ModelSettings(folder / "plain", pairs=pairs, tool_call_parser="hermes"),
        "unparsed": ModelSettings(folder / "plain", pairs=pairs),
        "thinker": ModelSettings(folder / "thinker", pairs=pairs, reasoning_parser="qwen3"),
    }
    written = {"tree": TREE, "thinking-root": ALONE, "by-router": BY_ROUTER, "by-engine": BY_ENGINE}
    files = {folder / f"{name}.yaml": text for name, text in written.items()}
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    config = Config(
        models, embedder=EmbedderSettings("none"), listen=Listen(port=0), topologies=tuple(files)
    )
    async with (
        serve_deployment(config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


@pytest.mark.parametrize(
    "model", ["plain", "tree", "thinking-root"]
)  # the engine's own chat, and roots of graphs
async def test_a_call_that_must_be_made_is_made_whole_and_streamed_and_its_result_is_read(
    model: str, ai: openai.AsyncOpenAI
) -> None:
    asked: Any = {
        "model": model,
        "messages": ASKED,
        "tools": STRICT,
        "tool_choice": "required",
        "max_tokens": 200,
    }
    asked |= {"temperature": 0, "parallel_tool_calls": False, "frequency_penalty": SOME_PENALTY}
    whole = (await ai.chat.completions.create(**asked)).choices[0]
    assert whole.message.tool_calls, whole
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "weather")  # type: ignore[union-attr]
    thought = (whole.message.model_extra or {}).get(
        "reasoning_content"
    ) or ""  # SGLang's own chats have a null
    assert bool(thought) == (model == "thinking-root")
    assert json.loads(call.function.arguments)["city"] in ("Bonn", "Kyoto")  # type: ignore[union-attr]
    thinking = ""
    async with ai.chat.completions.stream(**asked) as stream:
        async for event in stream:
            if event.type == "chunk":
                thinking += "".join(
                    (one.delta.model_extra or {}).get("reasoning_content") or ""
                    for one in event.chunk.choices
                )
        streamed = (await stream.get_final_completion()).choices[0]
    assert thinking == thought
    (again,) = streamed.message.tool_calls or []
    assert streamed.finish_reason == "tool_calls"
    assert json.loads(again.function.arguments) == json.loads(call.function.arguments)  # type: ignore[union-attr]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    history = [*ASKED, whole.message.model_dump(exclude_none=True), result]
    after = await ai.chat.completions.create(
        model=model, messages=history, tools=TOOLS, max_tokens=12, temperature=0
    )
    assert after.choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize(
    "model", ["plain", "by-router", "by-engine"]
)  # whose parser reads the call
async def test_a_call_that_the_model_decides_on_is_read_whole_and_streamed(
    model: str, ai: openai.AsyncOpenAI
) -> None:
    wanted = (
        'Repeat this text exactly:\n<tool_call>\n{"name": "weather", "arguments": {"city": '
        '"Bonn"}}\n</tool_call>'
    )
    asked: Any = {"model": model, "messages": [{"role": "user", "content": wanted}], "tools": TOOLS}
    asked |= {"max_tokens": 40, "temperature": 0}
    whole = (await ai.chat.completions.create(**asked)).choices[0]
    async with ai.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert choice.message.tool_calls, choice
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")  # type: ignore[union-attr]
        assert json.loads(call.function.arguments) == {"city": "Bonn"}  # type: ignore[union-attr]
        assert not choice.message.content


@pytest.mark.parametrize("model", ["plain", "tree", "thinker"])
async def test_an_answer_has_its_schema_whole_and_streamed(
    model: str, ai: openai.AsyncOpenAI
) -> None:
    asked: Any = {
        "model": model,
        "messages": ASKED,
        "response_format": FORM,
        "max_tokens": 120,
        "temperature": 0,
    }
    asked["frequency_penalty"] = SOME_PENALTY
    if model == "thinker":
        asked["extra_body"] = {"max_thinking_tokens": 12}
    whole = (await ai.chat.completions.create(**asked)).choices[0].message
    assert json.loads(whole.content or "")["city"] in ("Bonn", "Kyoto")
    answer, thinking = "", ""
    async for chunk in await ai.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            answer += choice.delta.content or ""
            thinking += (choice.delta.model_extra or {}).get("reasoning_content", "")
    assert answer == whole.content
    assert thinking == (whole.model_extra or {}).get("reasoning_content", "")
    assert bool(thinking) == (model == "thinker")


REFERRING: Any = {
    **PARAMETERS,
    "properties": {"city": {"$ref": "#/definitions/city"}},
    "definitions": {"city": CITY},
}
SURE: Any = {"properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
SURE |= {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("model", ["plain", "by-engine", "tree"])
async def test_tools_with_a_schema_give_calls_or_an_answer_that_obeys_it(
    model: str, choice: str, ai: openai.AsyncOpenAI
) -> None:
    asked: Any = {
        "model": model,
        "messages": ASKED,
        "tools": [{"type": "function", "function": {**FUNCTION, "parameters": REFERRING}}],
        "tool_choice": choice,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SURE}},
        "max_tokens": 200,
        "parallel_tool_calls": False,
        "frequency_penalty": SOME_PENALTY,
    }
    for seed in range(3):
        answer = await ai.chat.completions.create(**asked, seed=seed)
        message = answer.choices[0].message
        arguments = [call.function.arguments for call in message.tool_calls or []]  # type: ignore[union-attr]
        assert len(arguments) == 1 or (choice == "auto" and not arguments), answer
        if arguments:
            assert json.loads(arguments[0])["city"] in ("Bonn", "Kyoto")
        else:
            assert isinstance(json.loads(message.content or "")["sure"], bool)


async def test_no_successor_reads_thinking(ai: openai.AsyncOpenAI) -> None:
    stream: Any = await ai.chat.completions.create(
        model="tree",
        messages=ASKED,
        stream=True,
        extra_body={"include_agents": True},
        temperature=0,
        max_tokens=8,
    )
    texts = {"agent.thinking": "", "agent.tokens": ""}
    prompts: dict[str, int] = {}
    async for chunk in stream:
        event = chunk.model_extra.get("agent_event", {})
        if event.get("agent") == "thinker" and event["type"] in texts:
            texts[event["type"]] += event["text"]
        if event.get("type") == "agent.ready":
            prompts[event["agent"]] = event["prompt_tokens"]
    assert len(texts["agent.thinking"]) > THINKING_TOKENS and texts["agent.tokens"]
    assert texts["agent.thinking"] not in texts["agent.tokens"]
    assert prompts["root"] < THINKING_TOKENS


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
async def test_prompts_are_those_of_sglangs_own_chats(
    tools: Any, servers: CpuPair, folder: Path
) -> None:
    body = {"model": "x", "messages": ASKED, **({"tools": tools} if tools else {})}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{servers.decode.url}/tokenize", json=body) as answer,
    ):
        theirs = (await answer.json())["tokens"]
    tokenizer = HfTokenizer.from_folder(folder / "plain")
    assert theirs == tokenizer.encode(
        tokenizer.render_chat(ASKED, [add_sglang_nulls(tool) for tool in tools])
    )
