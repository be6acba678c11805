"""The shipped topologies with steps, on the shipped models, as a user's own client sees them."""

import json
from pathlib import Path

import openai
import pytest

from shell_router.app import load_config, serve_deployment

ROOT = Path(__file__).parents[2]
QUESTIONS = [
    json.loads(line)
    for line in (ROOT / "models/data/test.jsonl").read_text("utf-8").splitlines()[:20]
]
DEPLOYMENT = f"""
models:
  small: {{path: {ROOT}/models/small}}
  medium: {{path: {ROOT}/models/medium}}
  large: {{path: {ROOT}/models/large}}
topologies: [{ROOT}/topologies]
embedder: {{model: hash}}
listen: {{port: 0}}
record: {{folder: traces, prompts: true}}
"""


@pytest.mark.slow
async def test_who_answers_is_chosen_by_how_sure_the_small_model_is_by_the_question_and_by_a_label(
    tmp_path: Path,
) -> None:
    (tmp_path / "router.yaml").write_text(DEPLOYMENT, encoding="utf-8")
    async with (
        serve_deployment(load_config(tmp_path / "router.yaml", {})) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai,
    ):
        await sure_ones_end_with_the_small_model_and_others_with_the_large_one(ai)
        await the_question_and_a_label_choose(ai)
    lines = [
        json.loads(line)
        for file in (tmp_path / "traces").glob("*.jsonl")
        for line in file.read_bytes().splitlines()
    ]
    careful = [line for line in lines if line["agent"] == "careful"]
    assert {(line["topology"], line["stage"], tuple(line["reads"])) for line in careful} == {
        ("small-first/careful", "1", ("quick",))
    }
    assert {line["topology"] for line in lines if line["agent"].startswith("together/")} == {
        "tree-9-3-1"
    }


async def sure_ones_end_with_the_small_model_and_others_with_the_large_one(
    ai: openai.AsyncOpenAI,
) -> None:
    by_last: dict[str, list[float]] = {"quick": [], "careful": []}
    for question in QUESTIONS:
        answer = await asked(ai, "small-first", question["question"])
        agents = answer.model_extra["agents"]
        by_last[list(agents)[-1]].append(agents["quick"]["confidence"])
        alone = await asked(ai, "large" if "careful" in agents else "small", question["question"])
        assert answer.choices[0].message.content == alone.choices[0].message.content
    assert min(by_last["quick"]) >= 0.95 > max(by_last["careful"])


async def the_question_and_a_label_choose(ai: openai.AsyncOpenAI) -> None:
    kinds = {question["kind"]: question["question"] for question in QUESTIONS}
    choice = await asked(ai, "by-request", kinds["choice"])
    number = await asked(ai, "by-request", kinds["number"])
    together = await asked(ai, "by-request", kinds["number"], {"effort": "high"})
    assert list(choice.model_extra["agents"]) == ["choice"]
    assert next(iter(number.model_extra["agents"])) == "number"
    assert set(together.model_extra["agents"]) > {
        "together/root",
        "together/aggregator-1",
        "together/proposer-9",
    }
    assert "Answer" in together.choices[0].message.content


async def asked(
    ai: openai.AsyncOpenAI, model: str, question: str, labels: dict[str, str] | None = None
):  # type: ignore[no-untyped-def]
    """The completion, with its agents."""
    return await ai.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        metadata=labels or {},
        temperature=0,
        max_tokens=96,
        extra_body={"include_agents": True},
    )
