"""What agrees is passed on, on the shipped models, as a user's own client sees it."""

import json
from collections import Counter
from pathlib import Path

import openai
import pytest

from shell_router.config import load_config
from shell_router.wiring import running_server

ROOT = Path(__file__).parents[2]
QUESTIONS = [json.loads(line) for line in (ROOT / "models/data/test.jsonl").read_text("utf-8").splitlines()[:16]]
DEPLOYMENT = f"""
models:
  small: {{path: {ROOT}/models/small}}
  medium: {{path: {ROOT}/models/medium}}
  large: {{path: {ROOT}/models/large}}
topologies: [{ROOT}/topologies/evaluation/full-passing-on.yaml]
listen: {{port: 0}}
"""


@pytest.mark.slow
async def test_a_tree_answers_in_the_words_of_those_who_agree_and_aggregates_the_rest(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    config = load_config(tmp_path / "router.yaml", {})
    roots = Counter[str]()
    async with (
        running_server(config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai,
    ):
        for number, question in enumerate(QUESTIONS):
            answer = await ai.chat.completions.create(
                model="full-passing-on",
                messages=[{"role": "user", "content": question["question"]}],
                seed=number,
                extra_body={"include_agents": True},
            )
            agents = answer.model_extra["agents"]  # type: ignore[index]
            roots[agents["root"]["state"]] += 1
            assert "Answer" in (answer.choices[0].message.content or "")
            for agent in agents.values():
                assert agent["state"] != "passed_on" or agent["completion_tokens"] == 0
                assert agent["state"] != "finished" or agent["completion_tokens"] > 0
    assert roots["passed_on"] > 0
    assert roots["passed_on"] + roots["finished"] == len(QUESTIONS)
