"""/v1/batches: files of requests, answered beside the online ones."""

from aiohttp import web

from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.records import INPUT_PURPOSE, BatchRecord
from shell_router.api.batch.runs import BatchRuns
from shell_router.api.batch_body import BatchBody, read_batch
from shell_router.api.bodies import read_body
from shell_router.api.fields import Fields, parse_body
from shell_router.api.files import folder_of
from shell_router.api.pages import page
from shell_router.api.replies import json_reply, note_ignored
from shell_router.api.services import SERVICES, TENANT

BATCH_RUNS = web.AppKey("BATCH_RUNS", BatchRuns)


async def create_batch(request: web.Request) -> web.Response:
    """POST: answer the requests of a file."""
    folder = folder_of(request)
    body = parse_body(await read_body(request))
    asked = read_batch(body)
    _require_input(folder, request[TENANT], asked, body)
    note_ignored(request, body.unread)
    record = _record(request, asked)
    await request.app[BATCH_RUNS].add(record)
    return json_reply(request, record.as_told())


async def list_batches(request: web.Request) -> web.Response:
    """GET: the tenant's batches, the latest first."""
    batches = folder_of(request).batches.of(request[TENANT])
    return json_reply(request, page(batches, request.query, default=20, most=100))


async def show_batch(request: web.Request) -> web.Response:
    """GET: how far one is."""
    return json_reply(request, _asked(request).as_told())


async def cancel_batch(request: web.Request) -> web.Response:
    """POST: end what runs of it; what has been answered stays."""
    record = await request.app[BATCH_RUNS].cancel(_asked(request))
    return json_reply(request, record.as_told())


def _asked(request: web.Request) -> BatchRecord:
    return folder_of(request).batch_of(request[TENANT], request.match_info["batch_id"])


def _require_input(folder: BatchFolder, tenant: str, asked: BatchBody, body: Fields) -> None:
    if folder.file_of(tenant, asked.input_file_id).purpose != INPUT_PURPOSE:
        raise body.refuse("input_file_id", f"names a file whose purpose is not {INPUT_PURPOSE}")


def _record(request: web.Request, asked: BatchBody) -> BatchRecord:
    services = request.app[SERVICES]
    now = int(services.wall())
    return BatchRecord(
        id=f"batch_{services.new_id()}",
        tenant=request[TENANT],
        input_file_id=asked.input_file_id,
        endpoint=asked.endpoint,
        completion_window=asked.completion_window,
        created_at=now,
        expires_at=now + asked.window_s,
        metadata=asked.metadata,
    )
