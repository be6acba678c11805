"""Real frameworks on the router: LangGraph with one changed line, and LangGraph and AG2 with
tools."""

import argparse
import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from benchmarks.frameworks import MODELS, asked_tree, graph_of, measured
from shell_router.api import ApiSettings, create_app, serve_app
from shell_router.app import load_config, run_services
from shell_router.core.engine import Generation
from shell_router.http.server import bind_sockets
from shell_router.standins.embedded.settings import EmbeddedSection
from tests.fakes.api_server import LIMIT, Api, api
from tests.fakes.chat_engines import chat_pair
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]  # the frameworks' own warnings are theirs

ROOT = Path(__file__).parents[2]
QUESTIONS = (  # with answers long enough for updates, also on a busy machine
    "Tom has 12 pens, buys 31 more, loses 5 and gives 9 to Mia. How many pens has Tom now?",
    "Kim has 45 stamps, buys 13 more, sells 20 and gives 6 to Tom. How many stamps has Kim now?",
)


@asynccontextmanager
async def router() -> AsyncIterator[str]:
    """The tiny models in float64, where outputs depend on the prompts alone, behind an address."""
    config = load_config(ROOT / "configs" / "evaluation.yaml", os.environ)
    engine = {"embedded": EmbeddedSection(dtype="float64")}
    models = {alias: replace(model, engine=engine) for alias, model in config.models.items()}
    async with run_services(replace(config, models=models)) as services:
        with bind_sockets() as sockets:
            async with serve_app(create_app(services, ApiSettings()), sockets) as url:
                yield url


async def trace_of(url: str, reply: Any) -> dict[str, Any]:
    trace_id = reply.response_metadata["headers"]["x-trace-id"]
    async with (
        aiohttp.ClientSession(timeout=LIMIT) as http,
        http.get(f"{url}/v1/traces/{trace_id}") as answer,
    ):
        return json.loads(await answer.text())  # type: ignore[no-any-return]


async def test_a_langgraph_program_with_one_line_changed_answers_the_same_and_prefills_early() -> (
    None
):
    from langchain_openai import ChatOpenAI  # noqa: PLC0415 - the extra `ci` installs it

    tree = asked_tree(48)

    async def answers(
        url: str, question: str, extra: dict[str, object] | None
    ) -> tuple[list[str], Any]:
        options: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 48,
        }
        workers = {
            name: ChatOpenAI(model=name, **options, extra_body=extra) for name in MODELS
        }  # the line
        judge = {"extra_body": {"prefill": {"chunk_tokens": 16}}, "include_response_headers": True}
        graph, replies = graph_of(tree, workers, ChatOpenAI(model="large", **options, **judge))
        await asyncio.to_thread(graph.invoke, {"question": question, "outputs": {}})
        return [str(reply.content) for reply in replies.values()], replies[tree.root.id]

    async with router() as url:
        for question in QUESTIONS:
            plain, said = await answers(url, question, None)
            lazy, said_lazily = await answers(
                url, question, {"program": uuid.uuid4().hex, "lazy": True}
            )
            assert sum("lazyanswer" in text for text in lazy) == 12 and "lazyanswer" not in "".join(
                plain
            )
            assert said.content and said_lazily.content == said.content
            assert said_lazily.usage_metadata["input_tokens"] == said.usage_metadata["input_tokens"]
            (root,) = (await trace_of(url, said_lazily))["agents"].values()
            assert any(span["name"] == "prefill_increment" for span in root["spans"])


async def test_on_engines_that_take_their_time_every_way_gives_the_same_answers() -> None:
    asked = {
        "simulated": True,
        "questions": 1,
        "context": "300",
        "new_tokens": 16,
        "chunk_tokens": 4,
    }
    _, rows = await measured(argparse.Namespace(**asked))
    assert [(row["mode"], row["equal"]) for row in rows] == [
        (mode, "1 of 1") for mode in ("plain", "lazy", "topology")
    ]


async def test_ag2_agents_chat_plainly_and_lazily() -> None:
    from ag2 import Agent  # noqa: PLC0415 - the extra `ci` installs it
    from ag2.config import OpenAIConfig  # noqa: PLC0415

    async def judged(url: str, extra: dict[str, object] | None) -> str | None:
        options: dict[str, Any] = {
            "base_url": f"{url}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 32,
        }
        async with openai.DefaultAsyncHttpxClient() as options["http_client"]:
            solver = Agent(
                "solver",
                prompt="Solve it.",
                config=OpenAIConfig("small", **options, extra_body=extra),
            )
            judge = Agent("judge", prompt="Check it.", config=OpenAIConfig("large", **options))
            return (await judge.ask(f"{QUESTIONS[0]} {(await solver.ask(QUESTIONS[0])).body}")).body

    async with router() as url:
        plain = await judged(url, None)
        assert plain and await judged(url, {"program": uuid.uuid4().hex, "lazy": True}) == plain


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@asynccontextmanager
async def calling() -> AsyncIterator[Api]:
    """`small` calls tools by its engine's own chats, the root of `duo` by the router; both then say
    the result.
    """
    moa = ScriptedMoa(call_mark="<tool_call>")

    def root(request: Generation) -> Script:
        prompt = moa.tokenizers["large"].decode(request.input_ids)
        return Script("It says: dry" if "<tool>dry" in prompt else CALL)

    moa.engines["large"].answer = root
    async with chat_pair() as at, api(moa, relays={"small": at.pair}) as served:
        yield served
        await at.idle()
        assert not moa.running


@pytest.mark.parametrize("model", ["small", "duo"])
async def test_a_langgraph_agent_calls_its_tool_and_answers_by_its_result_whole_and_streamed(
    model: str,
) -> None:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415
    from langgraph.prebuilt import create_react_agent  # noqa: PLC0415

    cities: list[str] = []

    def weather(city: str) -> str:
        """How it is in a city."""
        cities.append(city)
        return "dry"

    async with calling() as served:
        chat_model = ChatOpenAI(
            model=model, base_url=f"{served.url}/v1", api_key="none", max_retries=0
        )  # type: ignore[arg-type]
        agent = create_react_agent(chat_model, [weather])
        asked: Any = {"messages": [("user", "Rain in Paris?")]}
        messages = (await agent.ainvoke(asked))["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        pieces = [piece async for piece, _ in agent.astream(asked, stream_mode="messages")]
        streamed = "".join([piece.text for piece in pieces if piece.type != "tool"])
        assert messages[-1].content == streamed == "It says: dry"
        assert cities == ["Paris", "Paris"]


class Weather(BaseModel, extra="forbid"):
    """How it is outside."""

    sky: Literal["clear", "grey"]
    wet: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_a_langchain_model_and_a_topology_answer_by_a_schema(method: Any) -> None:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415

    async with router() as url:
        for model in ("small", "tree"):
            chat_model = ChatOpenAI(
                model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=200
            )  # type: ignore[call-arg,arg-type]
            answer = await chat_model.with_structured_output(Weather, method=method).ainvoke(
                "Rain?"
            )
            assert isinstance(answer, Weather), answer


@pytest.mark.parametrize("model", ["small", "duo"])
async def test_an_ag2_agent_calls_its_tool_and_answers_by_its_result(model: str) -> None:
    from ag2 import Agent  # noqa: PLC0415
    from ag2.config import OpenAIConfig  # noqa: PLC0415

    async def weather(city: str) -> str:
        """How it is in a city."""
        return "dry" if city == "Paris" else "wet"

    async with calling() as served, openai.DefaultAsyncHttpxClient() as http:
        config = OpenAIConfig(model, base_url=f"{served.url}/v1", api_key="none", http_client=http)
        reply = await Agent(
            "forecaster", prompt="Ask the tool.", config=config, tools=[weather]
        ).ask("Rain in Paris?")
        assert reply.body == "It says: dry"
