"""Anthropic's own client: text, streams, tools, thinking, parsed answers, errors."""

from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from shell_router.api import ApiSettings
from shell_router.api.messages import MESSAGES
from tests.fakes.api_server import api
from tests.fakes.chat_engines import ChatScript, call, chat_pair

pytestmark = pytest.mark.slow

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

ROOT_SAYS = "root thinks and root speaks and then root is done"
WEATHER = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
RAIN = {"role": "user", "content": "Rain?"}


def test_no_field_of_anthropics_client_is_taken_for_a_misspelt_one() -> None:
    asked = get_type_hints(anthropic.types.message_create_params.MessageCreateParamsNonStreaming)
    MESSAGES.find_unknown(dict.fromkeys(asked, 1))


def client(url: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=url, api_key="sk-1", max_retries=0)


async def test_text_of_a_topology_whole_and_streamed_with_a_key() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served, client(served.url) as ai:
        answer = await ai.messages.create(
            model="duo", max_tokens=64, system="Be brief.", messages=[RAIN]
        )
        assert (answer.content[0].text, answer.stop_reason) == (ROOT_SAYS, "end_turn")
        async with ai.messages.stream(model="duo", max_tokens=64, messages=[RAIN]) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == final.content[0].text == ROOT_SAYS
        assert final.usage.output_tokens == answer.usage.output_tokens == 30
        assert final.usage.input_tokens > 0 and answer.usage.cache_read_input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await ai.messages.create(
                model="duo", max_tokens=64, messages=[RAIN], extra_body={"temperature": -1}
            )
        with pytest.raises(anthropic.NotFoundError, match="No topology or model"):
            await ai.messages.create(model="none", max_tokens=64, messages=[RAIN])


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_its_result_answered(streamed: bool) -> None:
    def says(body: Any) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": "Dry.", "reasoning_content": "Hm."}
        return call("weather", {"city": "Paris"})

    async with (
        chat_pair(ChatScript(say=says)) as at,
        api(relays={"small": at.pair}) as served,
        client(served.url) as ai,
    ):

        async def answer(messages: list[Any]) -> Any:
            asked = {"model": "small", "max_tokens": 64, "messages": messages, "tools": [WEATHER]}
            if not streamed:
                return await ai.messages.create(**asked)
            async with ai.messages.stream(**asked) as stream:
                return await stream.get_final_message()

        first = await answer([RAIN])
        used = first.content[0]
        assert (first.stop_reason, used.type, used.name, used.input) == (
            "tool_use",
            "tool_use",
            "weather",
            {"city": "Paris"},
        )
        dry = {"type": "tool_result", "tool_use_id": used.id, "content": "dry"}
        last = await answer(
            [
                RAIN,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [dry]},
            ]
        )
        assert last.content[-1].text == "Dry."
        if not streamed:  # the scripted servers stream no thinking
            assert last.content[0].thinking == "Hm."


async def test_a_parsed_answer_has_its_schema() -> None:
    class Answer(BaseModel):
        wet: bool

    def says(_: object) -> Any:
        return {"role": "assistant", "content": '{"wet": true}'}

    async with (
        chat_pair(ChatScript(say=says)) as at,
        api(relays={"small": at.pair}) as served,
        client(served.url) as ai,
    ):
        answer = await ai.messages.parse(
            model="small",
            max_tokens=64,
            messages=[RAIN],
            output_format=Answer,
            extra_body={
                "output_config": {
                    "effort": "low",
                    "format": {"type": "json_schema", "schema": Answer.model_json_schema()},
                }
            },
        )
        assert answer.parsed_output == Answer(wet=True)
        assert at.decode.sent[0][1]["response_format"]["json_schema"]["schema"][
            "properties"
        ].keys() == {"wet"}
