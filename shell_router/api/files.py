"""/v1/files: the inputs and the results of batches."""

import asyncio
import contextlib

from aiohttp import web

from shell_router.api.batch.disk import keep_as, on_disk
from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.records import FileRecord
from shell_router.api.drain import DRAIN
from shell_router.api.pages import page
from shell_router.api.replies import common_headers, json_reply, note_ignored
from shell_router.api.services import SERVICES, TENANT
from shell_router.api.upload import Upload, receive
from shell_router.errors import BatchesOff, InvalidField, StorageFailed

MOST_LISTED = 10_000


async def upload_file(request: web.Request) -> web.Response:
    """POST: keep a file."""
    folder = folder_of(request)
    id = f"file-{request.app[SERVICES].new_id()}"
    draft = folder.draft(id)
    try:
        async with request.app[DRAIN].until_cut():
            upload = await receive(request, draft)
        await on_disk(keep_as, draft, folder.content(id))
    finally:
        await on_disk(draft.unlink, missing_ok=True)
    record = _record(request, id, upload)
    await _save(folder, record)
    note_ignored(request, upload.ignored)
    return json_reply(request, record.as_told())


async def list_files(request: web.Request) -> web.Response:
    """GET: the tenant's files, the latest first unless `order` is asc."""
    purpose, order = request.query.get("purpose"), request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidField("order must be asc or desc.", field="order")
    files = [one for one in folder_of(request).files.of(request[TENANT]) if purpose in (None, one.purpose)]
    if order == "asc":
        files.reverse()
    return json_reply(request, page(files, request.query, default=MOST_LISTED, most=MOST_LISTED))


async def show_file(request: web.Request) -> web.Response:
    """GET: what is known of one."""
    return json_reply(request, _asked(request).as_told())


async def file_content(request: web.Request) -> web.StreamResponse:
    """GET: what it holds."""
    record = _asked(request)
    headers = {**common_headers(request), "Content-Type": "application/jsonl"}
    return web.FileResponse(folder_of(request).content(record.id), headers=headers)


async def delete_file(request: web.Request) -> web.Response:
    """DELETE: forget it. A batch that reads it has a link of its own."""
    record, folder = _asked(request), folder_of(request)
    await folder.files.remove(record.id)
    await on_disk(folder.content(record.id).unlink, missing_ok=True)
    return json_reply(request, {"id": record.id, "object": "file", "deleted": True})


def folder_of(request: web.Request) -> BatchFolder:
    """Where files and batches are kept. Raises BatchesOff."""
    folder = request.app[SERVICES].batch_folder
    if folder is None:
        raise BatchesOff(
            "This router keeps no files and runs no batches.",
            remedy="Set batches.folder in its configuration.",
        )
    return folder


def _asked(request: web.Request) -> FileRecord:
    return folder_of(request).file_of(request[TENANT], request.match_info["file_id"])


def _record(request: web.Request, id: str, upload: Upload) -> FileRecord:
    now = int(request.app[SERVICES].wall())
    return FileRecord(id, request[TENANT], upload.filename or "", upload.texts["purpose"], upload.bytes, now)


async def _save(folder: BatchFolder, record: FileRecord) -> None:
    try:
        await folder.files.save(record)
    except (StorageFailed, asyncio.CancelledError):  # or the client left, and knows no id to ask for
        with contextlib.suppress(StorageFailed):  # the first one says what is wrong
            await folder.files.remove(record.id)
            await on_disk(folder.content(record.id).unlink, missing_ok=True)
        raise
