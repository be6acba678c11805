"""Questions that a running router answers as a batch, on what its online requests leave."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import orjson

from shell_router.batch.journal import replace_file
from shell_router.batch.questions import Questions
from shell_router.core.exact_json import Values
from shell_router.errors import ConfigError, ShellRouterError
from shell_router.lab.evaluation.client import RouterClient

ENDPOINT = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
BEGUN = "batch.json"
RESULTS = {"output_file_id": "output.jsonl", "error_file_id": "errors.jsonl"}
POLL_S = 2.0


def write_lines(target: str, questions: Questions) -> bytes:
    """Return the batch's lines; those whose prompts begin alike come one after the other."""
    lines = [
        {
            "custom_id": question.id,
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": target, "messages": [{"role": "user", "content": question.text}]},
        }
        for question in sorted(questions.asked, key=lambda question: question.text)
    ]
    return b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)


async def answer_online(
    client: RouterClient,
    target: str,
    questions: Questions,
    folder: Path,
    on_progress: Callable[[str], None],
) -> Values:
    """Have `target`, a model or topology of the router, answer; write the results to `folder`.

    A batch that was begun there goes on, unless it has failed, expired or was cancelled.

    Returns:
        The completed batch.

    Raises:
        ConfigError: The folder belongs to another batch.
        ShellRouterError: The router does not answer, refuses the batch, or does not complete it.
    """
    asked = [target, questions.fingerprint]
    batch_id = _find_begun(folder, asked)
    if not batch_id:
        batch_id = await _begin(client, write_lines(target, questions))
        replace_file(folder / BEGUN, orjson.dumps([batch_id, *asked]))
    shown = ""
    while True:
        batch, _ = await client.fetch("GET", f"/v1/batches/{batch_id}")
        counts = batch["request_counts"]
        progress = f"{batch['status']}: {counts['completed']} answered, {counts['failed']} failed"
        if progress != shown:
            on_progress(progress)
            shown = progress
        if batch["status"] in ENDS:
            break
        await asyncio.sleep(POLL_S)
    for kind, name in RESULTS.items():
        if batch[kind] is not None:
            path = f"/v1/files/{batch[kind]}/content"
            status, content, _ = await client.request("GET", path)
            if status != 200:
                raise ShellRouterError(
                    f"{path} was answered with status {status}.", remedy="Run this again."
                )
            replace_file(folder / name, content)
    if batch["status"] != "completed":
        (folder / BEGUN).unlink()
        problems = [problem["message"] for problem in (batch.get("errors") or {"data": []})["data"]]
        raise ShellRouterError(
            " ".join([f"Batch {batch_id} is {batch['status']}.", *problems]),
            remedy="Run this again to begin another batch.",
        )
    return batch


def _find_begun(folder: Path, asked: list[str]) -> str:
    """Return the id of the batch that was begun in the folder; empty if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / BEGUN).exists():
        return ""
    batch_id, *known = orjson.loads((folder / BEGUN).read_bytes())
    if known != asked:
        raise ConfigError(
            f"{folder} has the batch {batch_id} of other questions, or to another model.",
            remedy="Name another folder.",
        )
    return str(batch_id)


async def _begin(client: RouterClient, lines: bytes) -> str:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", lines, filename="questions.jsonl")
    file, _ = await client.fetch("POST", "/v1/files", form=form)
    asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch, _ = await client.fetch("POST", "/v1/batches", asked)
    return str(batch["id"])
