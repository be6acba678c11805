"""lm-evaluation-harness asks a topology as it asks any OpenAI-compatible model."""

import asyncio
import os
import re
import sys
from pathlib import Path

import orjson
import pytest

from shell_router.core.engine import Generation
from shell_router.lab.evaluation.records import EvaluationOptions
from shell_router.lab.evaluation.run import run_evaluation
from tests.fakes.api_server import Api, api
from tests.fakes.evaluations import adding_moa, write_sums
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

TASK = Path(__file__).parents[2] / "configs" / "lm-eval" / "questions.yaml"
LIMIT_S = 180

pytestmark = pytest.mark.slow


async def _harness(served: Api, folder: Path) -> str:
    """What `lm-eval` prints when it asks the topology `duo` the task in `folder`; it may ask no
    other server.
    """
    where = f"base_url={served.url}/v1/chat/completions,num_concurrent=4,max_retries=1"
    model = (
        "--model",
        "local-chat-completions",
        "--model_args",
        f"model=duo,{where},tokenizer_backend=none",
    )
    task = ("--tasks", "questions", "--include_path", folder, "--output_path", folder / "out")
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lm_eval", "run", *model, "--apply_chat_template", *map(str, task)),
        cwd=folder,
        env=os.environ | offline,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def _right(served: Api, folder: Path) -> tuple[float, str]:
    """The share of right answers to the questions in `folder`, and what was printed."""
    for file in (TASK, TASK.with_name("own_graders.py")):
        (folder / file.name).write_bytes(file.read_bytes())
    printed = await _harness(served, folder)
    [report] = (folder / "out").rglob("results_*.json")
    return orjson.loads(report.read_bytes())["results"]["questions"]["right,none"], printed


async def test_the_harness_gets_the_accuracy_of_a_topology_that_knows_three_of_four_sums(
    tmp_path: Path,
) -> None:
    write_sums(tmp_path, 4, 5, 10, 20).rename(tmp_path / "questions.jsonl")
    moa = adding_moa({"small": 5, "large": 15})
    async with api(moa) as served:
        right, printed = await _right(served, tmp_path)
    assert right == 0.75, printed
    assert len(moa.engines["large"].generated) == 4


ANSWERS = {  # what the model says, the right answer, and whether they agree
    "So it is. #### 1,200": ("$1200.00", True),
    r"Thus \boxed{\text{B}}": ("(B)", True),
    "The answer is (C) because it is": ("C", True),
    "Answer: New York": ("new york.", True),
    "Answer: New Delhi": ("New York", False),
    "Answer: A dog": ("A", False),
}


async def test_the_harness_grades_as_the_evaluation_does(tmp_path: Path) -> None:
    words = ("one", "two", "three", "four", "five", "six")
    said = dict(zip(words, ANSWERS, strict=True))
    lines = [{"question": f"Say {word}", "answer": ANSWERS[said[word]][0]} for word in words]
    data = tmp_path / "questions.jsonl"
    data.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    moa = ScriptedMoa()
    large, tokenizer = moa.engines["large"], moa.tokenizers["large"]

    def answer(request: Generation) -> Script:
        asked = re.findall(r"Say (\w+)", tokenizer.decode(request.input_ids))
        return Script(said[asked[-1]] if asked else "Yes.")

    large.answer = answer
    async with api(moa) as served:
        right, printed = await _right(served, tmp_path)
        report = tmp_path / "report.json"
        ours = await run_evaluation(
            EvaluationOptions(data, url=served.url, settings=("duo",), json=report)
        )
    wanted = sum(agree for _, agree in ANSWERS.values()) / len(ANSWERS)
    assert (right, ours.rows[0].accuracy.value) == (pytest.approx(wanted), pytest.approx(wanted)), (
        printed
    )
