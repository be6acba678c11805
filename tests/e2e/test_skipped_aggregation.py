"""Agreeing clusters skip their aggregators, on the shipped models, as a user's own client sees
it."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from shell_router.app import load_config, serve_deployment

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    json.loads(line)
    for line in (ROOT / "models/data/test.jsonl").read_text("utf-8").splitlines()[:16]
]
DEPLOYMENT = f"""
models:
  small: {{path: {ROOT}/models/small}}
  medium: {{path: {ROOT}/models/medium}}
  large: {{path: {ROOT}/models/large}}
topologies: [{ROOT}/topologies/evaluation/full.yaml]
listen: {{port: 0}}
"""


@pytest.mark.slow
async def test_a_tree_answers_in_the_words_of_those_who_agree_and_aggregates_the_rest(
    tmp_path: Path,
) -> None:
    (tmp_path / "router.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    config = load_config(tmp_path / "router.yaml", {})
    roots = Counter[str]()
    async with (
        serve_deployment(config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai,
    ):
        for number, question in enumerate(QUESTIONS):
            stream = await ai.chat.completions.create(
                model="full",
                messages=[{"role": "user", "content": question["question"]}],
                seed=number,
                stream=True,
                extra_body={"include_agents": True},
            )
            roots[ended_of([chunk.model_dump() async for chunk in stream])] += 1
    assert roots["skipped"] > 0
    assert roots["skipped"] + roots["finished"] == len(QUESTIONS)


def ended_of(chunks: Sequence[Mapping[str, Any]]) -> str:
    """The root's state, once it is seen that its answer is in the words of the agent whose output
    was forwarded.
    """
    written, sources = defaultdict[str, str](str), dict[str, str]()
    for reported in (chunk["agent_event"] for chunk in chunks if "agent_event" in chunk):
        if reported["type"] == "agent.tokens":
            written[reported["agent"]] += reported["text"]
        elif reported["type"] == "agent.skipped":
            sources[reported["agent"]] = reported["source"]
    answer = "".join(
        choice["delta"]["content"] or "" for chunk in chunks for choice in chunk["choices"]
    )
    assert "Answer" in answer
    writer = "root"
    while writer in sources:
        assert not written[writer]
        writer = sources[writer]
    assert writer == "root" or answer == written[writer]
    (agents,) = (chunk["agents"] for chunk in chunks if "agents" in chunk)
    return str(agents["root"]["state"])
