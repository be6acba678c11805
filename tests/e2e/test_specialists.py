"""The shipped specialists: `auto` finds the one that knows a topic, and a vote needs no choice."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest
from training.questions import read_problems

from shell_router.app import load_config, serve_deployment
from tests.integration.test_auto_deployment import answering

ROOT = Path(__file__).parents[2]
QUESTIONS = read_problems(ROOT / "models/data/specialists.jsonl")[:16]


@pytest.mark.slow
async def test_auto_and_the_vote_follow_the_specialist_of_a_questions_topic() -> None:
    config = load_config(ROOT / "configs/specialists.yaml", {})
    listen, prediction = replace(config.listen, port=0), replace(config.prediction, limit_s=30)
    right, knowing = Counter[str](), 0
    async with (
        serve_deployment(replace(config, listen=listen, prediction=prediction)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai,
    ):
        async with aiohttp.ClientSession() as client:
            await answering(client, url)
        for question in QUESTIONS:
            for asked in ("auto", "specialists", "by-topic", *config.auto.models):
                answer = await ai.chat.completions.create(
                    model=asked,
                    messages=[{"role": "user", "content": question.question}],
                    metadata={"topic": question.topic or ""},
                    max_tokens=96,
                    temperature=0,
                    extra_body={"include_agents": True},
                )
                right[asked] += (answer.choices[0].message.content or "").endswith(
                    f"Answer: {question.answer}"
                )
                agents = list((answer.model_extra or {})["agents"].values())
                if asked == "auto":
                    knowing += question.topic == "groups" and agents[0]["model"] == "groups"
                if asked == "by-topic":
                    assert [one["model"] for one in agents] == [question.topic]
    best = max(right[one] for one in config.auto.models)
    assert knowing == sum(question.topic == "groups" for question in QUESTIONS) > 0
    assert min(right["auto"], right["specialists"]) > best
