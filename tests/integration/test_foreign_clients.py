"""LiteLLM, Together's client and optillm, whose pins conflict with ours, each in an environment of
its own.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shell_router.engines.embedding import HashEmbedder
from shell_router.topology import Agent, Topology
from tests.fakes.api_server import DUO, api
from tests.fakes.chat_engines import chat_pair
from tests.fakes.foreign_clients import answer_of, python_with
from tests.fakes.moa import ScriptedMoa

pytestmark = pytest.mark.slow

ROOT_SAYS = "root thinks and root speaks and then root is done"
ALIASES = (
    "meta-llama/Llama-3.3-70B-Instruct-Turbo",
    "Qwen/Qwen2.5-72B-Instruct-Turbo",
    "microsoft/WizardLM-2-8x22B",
)
LITELLM = ("litellm==1.80.0",)
TOGETHER = ("together==1.5.30",)
OPTILLM = ("openai",), ("optillm==0.4.0",)


@asynccontextmanager
async def router() -> AsyncIterator[tuple[str, ScriptedMoa]]:
    """A tree, a plain model that has chats of its own, an embedder, and the names that Together's
    script asks for.
    """
    aliases = [Topology(name, {"only": Agent("only", "medium")}) for name in ALIASES]
    moa = ScriptedMoa(context_length=32_768)  # optillm asks for 4,096 tokens
    async with (
        chat_pair() as at,
        api(
            moa,
            relays={"small": at.pair},
            topologies=(DUO, *aliases),
            embedders={"hash": HashEmbedder(8)},
        ) as served,
    ):
        yield served.url, moa


ASK_LITELLM = """
import json, litellm
question = [{"role": "user", "content": "Rain?"}]
router = {"api_base": url + "/v1", "api_key": "none"}
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]

def chat(model, **fields):
    return litellm.completion(model=f"openai/{model}", messages=fields.pop("messages", question), **router, **fields)

whole = chat("duo")
streamed = [chunk.choices[0].delta.content or "" for chunk in chat("duo", stream=True)]
called = chat("small", tools=tools).choices[0].message
result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "dry"}
after = chat("small", tools=tools, messages=[*question, called.model_dump(), result])
deltas = [c.choices[0].delta.tool_calls for c in chat("small", tools=tools, stream=True)]
arguments = "".join(one.function.arguments or "" for calls in deltas for one in calls or ())
response = litellm.responses(model="openai/duo", input="Rain?", **router)
vector = litellm.embedding(model="openai/hash", input=["one"], encoding_format="float", **router)
message = litellm.completion(model="anthropic/duo", messages=question, max_tokens=64, api_base=url, api_key="none")
lazy = chat("small", extra_body={"program": "litellm", "lazy": True}).choices[0].message.content
judged = chat("duo", messages=[{"role": "user", "content": f"Judge: {lazy}"}])
print(json.dumps({
    "lazy": lazy[:13], "judged": judged.choices[0].message.content,
    "whole": whole.choices[0].message.content, "tokens": whole.usage.completion_tokens, "streamed": "".join(streamed),
    "called": called.tool_calls[0].function.name, "after": after.choices[0].message.content, "arguments": arguments,
    "response": response.output[0].content[0].text, "width": len(vector.data[0]["embedding"]),
    "message": message.choices[0].message.content,
}))
"""


async def test_litellm_chats_streams_calls_tools_and_asks_every_shape() -> None:
    python = python_with(LITELLM)
    async with router() as (url, _):
        assert await answer_of(python, ASK_LITELLM, url) == {
            "lazy": "[[lazyanswer:",
            "judged": ROOT_SAYS,
            "whole": ROOT_SAYS,
            "tokens": 30,
            "streamed": ROOT_SAYS,
            "called": "weather",
            "after": "It says: dry",
            "arguments": '{"city":"Paris"}',
            "response": ROOT_SAYS,
            "width": 8,
            "message": ROOT_SAYS,
        }


ASK_TOGETHER = """
import asyncio, json
from together import AsyncTogether, Together
router = {"base_url": url + "/v1", "api_key": "none"}
question = {"role": "user", "content": "Rain?"}

async def references():
    client = AsyncTogether(**router)
    ask = client.chat.completions.create
    asked = [ask(model=name, messages=[question], temperature=0.7, max_tokens=64) for name in names]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

said = asyncio.run(references())
listed = "".join(f"\\n{number}. {text}" for number, text in enumerate(said, start=1))
system = {"role": "system", "content": "Merge these answers into one:" + listed}

def aggregated(**fields):
    ask = Together(**router).chat.completions.create
    chunks = list(ask(model=names[1], messages=[system, question], stream=True, **fields))
    whole = [chunk for chunk in chunks if chunk.choices]  # the script reads a choice of every chunk
    bare = [chunk.usage.completion_tokens for chunk in chunks if not chunk.choices]
    return "".join([chunk.choices[0].delta.content or "" for chunk in whole]), bare

print(json.dumps({"said": said, "plain": aggregated(), "counted": aggregated(stream_options={"include_usage": True})}))
"""


async def test_togethers_moa_gathers_references_by_hub_names_and_streams_the_aggregator() -> None:
    python = python_with(TOGETHER)
    async with router() as (url, moa):
        found = await answer_of(python, f"names = {ALIASES!r}\n{ASK_TOGETHER}", url)
        medium = moa.engines["medium"]
    only = ROOT_SAYS.replace("root", "only")
    assert found["said"] == [only] * 3
    assert found["plain"] == [only, []]  # no chunk without a choice, unless it is asked for
    assert found["counted"] == [only, [len(moa.models["medium"].tokenizer.encode(only))]]
    prompt = moa.models["medium"].tokenizer.decode(medium.generated[-1].input_ids)
    assert "Merge these answers into one:" in prompt and all(
        f"{number}. {only}" in prompt for number in (1, 2, 3)
    )


ASK_OPTILLM = """
import importlib.util, json, openai, sys, types
folder = importlib.util.find_spec("optillm").submodule_search_locations[0]
# its package imports a server with torch: only the module that asks is loaded, and its log of conversations is off
sys.modules["optillm"] = package = types.ModuleType("optillm")
package.conversation_logger = None
spec = importlib.util.spec_from_file_location("optillm.moa", folder + "/moa.py")
moa = importlib.util.module_from_spec(spec)
spec.loader.exec_module(moa)
client = openai.OpenAI(base_url=url + "/v1", api_key="none")
print(json.dumps(moa.mixture_of_agents("Be brief.", "Rain?", client, "small")))
"""


async def test_optillms_mixture_of_agents_asks_a_plain_model_for_three_choices() -> None:
    python = python_with(*OPTILLM)
    async with router() as (url, _):
        text, tokens = await answer_of(python, ASK_OPTILLM, url)
        assert text == ROOT_SAYS.replace("root", "small") and tokens > 0
