"""The HTTP routes of files and batches, as OpenAI's clients use them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Required

from pydantic import Field
from typing_extensions import TypedDict

from shell_router.api.bodies import read_labels, read_object
from shell_router.api.chat import CHATS
from shell_router.api.fields import Labels
from shell_router.api.openapi import BODIES
from shell_router.api.replies import json_reply, note_ignored, whole_reply
from shell_router.api.services import KEY, SERVICES, SETTINGS, TENANT
from shell_router.api.streaming import open_stream
from shell_router.batch.api.run import BatchRuns
from shell_router.batch.api.runner import ChatLines, PoolLines, load_pools
from shell_router.batch.api.storage import (
    INPUT_PURPOSE,
    BatchFolder,
    BatchRecord,
    FileRecord,
    keep_as,
    on_disk,
    open_folder,
)
from shell_router.batch.api.uploads import CHUNK_BYTES, UploadQuota, receive_upload
from shell_router.config import BatchesSettings, Config
from shell_router.core.validation import JsonObject, Name, field_error
from shell_router.errors import Forbidden, InvalidField, Overloaded, StorageFailed
from shell_router.http.app import App, Key, Reply, Request, Response, Route
from shell_router.moa.deadline import Deadline

MAX_LISTED_FILES = 10_000
MAX_UNFINISHED = 100
"""Batches of one tenant."""
JSONL = "application/jsonl"

BATCH_RUNS = Key[BatchRuns]("BATCH_RUNS")


class BatchBody(TypedDict, total=False):
    """A new batch. The window is a number of hours, as `24h`."""

    input_file_id: Required[Name]
    endpoint: Required[Literal["/v1/chat/completions"]]
    completion_window: Required[Annotated[str, Field(pattern="^[1-9][0-9]{0,3}h$")]]
    metadata: Labels


BATCH = JsonObject(BatchBody, {"completion_window": "Write a number of hours, as 24h."})
QUOTA = Key[UploadQuota]("QUOTA")


@contextlib.contextmanager
def attach_batches(config: Config) -> Iterator[Callable[[App], None]]:
    """Lock the deployment's folder, read its pools, and yield what adds batches to the application.

    Raises ConfigError if the folder cannot be used, or a pool's name or file is wrong.
    """
    assert config.batches.folder is not None
    with open_folder(config.batches.folder) as folder:
        pools = load_pools(config)

        def add(app: App) -> None:
            runners = {
                name: PoolLines(name, pool, folder.pools, app[SERVICES])
                for name, pool in pools.items()
            }
            add_batches(app, folder, config.batches, runners)

        yield add


def add_batches(
    app: App,
    folder: BatchFolder,
    settings: BatchesSettings,
    pools: Mapping[str, PoolLines],
) -> None:
    """Add the routes, and run batches from the server's start to its stop.

    At the stop lines end at once, for the requests that still run. `pools` answer the lines that
    name one as their model.
    """
    runner = ChatLines(app[CHATS], settings.concurrency, pools)
    runs = BatchRuns(
        folder, runner, app[SERVICES], app[SETTINGS].max_body_bytes, settings.file_ttl_s
    )
    app[BATCH_RUNS] = runs
    app[QUOTA] = UploadQuota(folder, settings)
    expiring = list[asyncio.Task[None]]()

    async def resume() -> None:
        runs.resume()
        expiring.append(asyncio.create_task(runs.expire_files(), name="expire-files"))

    async def stop() -> None:
        expiring[0].cancel()
        await asyncio.wait(expiring)
        await runs.stop()

    app.on_startup.append(resume)
    app.on_shutdown.append(stop)
    app[BODIES]["POST /v1/batches"] = BATCH
    app.routes.extend(ROUTES)


async def upload_file(request: Request) -> Response:
    """Keep a file."""
    folder = _get_folder(request)
    services = request.app[SERVICES]
    id = f"file-{services.new_id()}"
    tenant = request[TENANT]
    draft = folder.draft(id)
    with request.app[QUOTA].reserve(tenant, id, request.content_length) as max_bytes:
        try:
            with Deadline(None, request.app[SERVICES].deadlines):
                upload = await receive_upload(request, draft, max_bytes)
            record = FileRecord.create(
                id,
                tenant,
                upload.filename or "",
                upload.texts["purpose"],
                upload.bytes,
                int(services.wall()),
                request.app[BATCH_RUNS].file_ttl_s,
            )
            await on_disk(keep_as, draft, folder.content(id))
            await folder.files.save(record)
        except (StorageFailed, asyncio.CancelledError):
            # a client that left knows no id, so the file goes; the first error says what is wrong
            with contextlib.suppress(StorageFailed):
                await folder.remove(id)
            raise
        finally:
            await on_disk(draft.unlink, missing_ok=True)
    note_ignored(request, upload.ignored)
    return json_reply(request, record.as_json())


async def list_files(request: Request) -> Response:
    """List the tenant's files, the latest first unless `order` is asc."""
    purpose = request.query.get("purpose")
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidField("order must be asc or desc.", field="order")
    files = _get_folder(request).files.of(request[TENANT])
    if purpose is not None:
        files = [file for file in files if file.purpose == purpose]
    if order == "asc":
        files.reverse()
    page = build_page(files, request.query, default=MAX_LISTED_FILES, most=MAX_LISTED_FILES)
    return json_reply(request, page)


async def show_file(request: Request) -> Response:
    """Return a file's record."""
    return json_reply(request, _find_file(request).as_json())


async def send_content(request: Request) -> Reply:
    """Send a file's content. A client that takes nothing for `write_timeout_s` is given up."""
    file = _find_file(request)
    sizes = {"Content-Length": str(file.bytes)}
    if request.method == "HEAD":
        return whole_reply(request, b"", 200, JSONL, sizes)
    with await on_disk(_get_folder(request).content(file.id).open, "rb") as content:
        stream = await open_stream(request, content_type=JSONL, headers=sizes)
        while chunk := await on_disk(content.read, CHUNK_BYTES):
            await stream.send(chunk)
        return await stream.end()


async def delete_file(request: Request) -> Response:
    """Delete a file."""
    record = _find_file(request)
    await _get_folder(request).remove(record.id)
    return json_reply(request, {"id": record.id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> Response:
    """Answer the requests of a file."""
    if request[KEY].models:
        raise Forbidden(
            "The API key is for some models only, and lines may name any.",
            remedy="Use another key.",
        )
    services = request.app[SERVICES]
    folder = _get_folder(request)
    sent = await read_object(request)
    body = BATCH.read(sent)
    ignored = BATCH.find_unknown(sent)
    record = read_batch(body, f"batch_{services.new_id()}", request[TENANT], int(services.wall()))
    file = folder.files.find(record.tenant, record.input_file_id)
    if file.purpose != INPUT_PURPOSE:
        what = f"names a file whose purpose is not {INPUT_PURPOSE}"
        raise field_error("input_file_id", what)
    note_ignored(request, ignored)
    unfinished = sum(not batch.ended for batch in folder.batches.of(record.tenant))
    if unfinished >= MAX_UNFINISHED:
        raise Overloaded(
            f"{unfinished} of your batches have not ended.",
            remedy="Send larger ones, or wait for them.",
        )
    await request.app[BATCH_RUNS].add(replace(record, input_bytes=file.bytes))
    return json_reply(request, record.as_json())


async def list_batches(request: Request) -> Response:
    """List the tenant's batches, the latest first."""
    batches = _get_folder(request).batches.of(request[TENANT])
    return json_reply(request, build_page(batches, request.query, default=20, most=100))


async def show_batch(request: Request) -> Response:
    """Return a batch's record."""
    return json_reply(request, _find_batch(request).as_json())


async def cancel_batch(request: Request) -> Response:
    """Abort a batch's running lines; those that were answered stay."""
    record = await request.app[BATCH_RUNS].cancel(_find_batch(request))
    return json_reply(request, record.as_json())


ROUTES = (
    Route("POST", "/v1/files", upload_file, streams_body=True),
    Route("GET", "/v1/files", list_files),
    Route("GET", "/v1/files/{file_id}", show_file),
    Route("GET", "/v1/files/{file_id}/content", send_content),
    Route("DELETE", "/v1/files/{file_id}", delete_file),
    Route("POST", "/v1/batches", create_batch),
    Route("GET", "/v1/batches", list_batches),
    Route("GET", "/v1/batches/{batch_id}", show_batch),
    Route("POST", "/v1/batches/{batch_id}/cancel", cancel_batch),
)


def _get_folder(request: Request) -> BatchFolder:
    return request.app[BATCH_RUNS].folder


def _find_file(request: Request) -> FileRecord:
    return _get_folder(request).files.find(request[TENANT], request.match["file_id"])


def _find_batch(request: Request) -> BatchRecord:
    return _get_folder(request).batches.find(request[TENANT], request.match["batch_id"])


def read_batch(body: BatchBody, id: str, tenant: str, now: int) -> BatchRecord:
    """Return the batch of a validated body, created at the Unix time `now`.

    Raises InvalidField.
    """
    window = body["completion_window"]
    ends = now + 3600 * int(window.removesuffix("h"))
    metadata = body.get("metadata")
    if metadata is not None:
        metadata = dict(read_labels(metadata))
    return BatchRecord(
        id, tenant, body["input_file_id"], body["endpoint"], window, now, ends, metadata
    )


def build_page(
    records: Sequence[FileRecord | BatchRecord],
    query: Mapping[str, str],
    *,
    default: int,
    most: int,
) -> dict[str, Any]:
    """Return the `limit` records after the one named by `after`, in OpenAI's form.

    Raises InvalidField.
    """
    begin = 0
    limit = query.get("limit", str(default))
    if "after" in query:
        ids = [record.id for record in records]
        if query["after"] not in ids:
            raise InvalidField(
                "after names nothing in this list.",
                field="after",
                remedy="Take the last_id of a page.",
            )
        begin = ids.index(query["after"]) + 1
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise InvalidField(f"limit must be a whole number from 1 to {most}.", field="limit")
    end = begin + int(limit)
    data = [record.as_json() for record in records[begin:end]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": end < len(records),
    }
