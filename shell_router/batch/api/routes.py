"""Receiving an uploaded file: from a multipart form to the disk, a chunk at a time."""

import asyncio
import contextlib
import re
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from shell_router.api.admission import DRAIN
from shell_router.api.chat import CHATS
from shell_router.api.fields import Fields, parse_body, read_body
from shell_router.api.replies import common_headers, json_reply, note_ignored
from shell_router.api.services import KEY, SERVICES, SETTINGS, TENANT
from shell_router.api.streaming import EventStream, open_stream
from shell_router.batch.api.run import BatchRuns
from shell_router.batch.api.runner import ChatLines, PoolLines, loaded_pools
from shell_router.batch.api.storage import (
    INPUT_PURPOSE,
    BatchFolder,
    BatchRecord,
    FileRecord,
    keep_as,
    on_disk,
    opened_folder,
)
from shell_router.batch.journal import append_whole
from shell_router.config import BatchesSettings, Config
from shell_router.errors import (
    FileTooLarge,
    Forbidden,
    InvalidField,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    StorageFailed,
)

T = TypeVar("T")

CHUNK_BYTES = 2**18
MOST_TEXT_BYTES = 1024
MOST_FIELDS = 16
UNREADABLE = (ValueError, LookupError, RuntimeError, AssertionError, BadHttpMessage, zlib.error)
"""What aiohttp raises for parts with odd headers, encodings and ends."""
FORM_REMEDY = "Send multipart/form-data with the fields purpose and file, as OpenAI's clients do."


@dataclass(slots=True)
class Upload:
    """A form that is being read into `path`: its file's name and size, and the other fields that
    were sent.
    """

    path: Path
    filename: str | None = None
    bytes: int = 0
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without effect."""
        return tuple(name for name in self.texts if name != "purpose")


async def receive(request: web.Request, path: Path, max_bytes: int) -> Upload:
    """Write the form's file of at most `max_bytes` to `path`.

    Raises InvalidRequest and StorageFailed; `path` may then hold a part of it.
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("The body is not a form.", remedy=FORM_REMEDY)
    upload = Upload(path)
    try:
        await _read_form(request, await request.multipart(), upload, max_bytes)
    except UNREADABLE as error:
        raise InvalidRequest(f"The form cannot be read: {error}.", remedy=FORM_REMEDY) from None
    if "purpose" not in upload.texts:
        raise InvalidField("purpose is missing.", field="purpose", remedy="Set it to batch.")
    if upload.filename is None:
        raise InvalidField("file is missing.", field="file", remedy=FORM_REMEDY)
    return upload


async def _read_form(
    request: web.Request, form: MultipartReader, upload: Upload, max_bytes: int
) -> None:
    limit_s = request.app[SETTINGS].body_timeout_s
    while (part := await _in_time(form.next(), limit_s)) is not None:
        if not isinstance(part, BodyPartReader) or part.name is None:
            raise InvalidRequest("The form has a part without a name.", remedy=FORM_REMEDY)
        if len(upload.texts) == MOST_FIELDS or len(part.name) > MOST_TEXT_BYTES:
            raise InvalidRequest(
                f"The form has more than {MOST_FIELDS} fields, or a long one.", remedy=FORM_REMEDY
            )
        if part.name == "file":
            await _store(part, upload, max_bytes, limit_s)
        else:
            upload.texts[part.name] = await _text(part, limit_s)
            purpose = upload.texts.get("purpose", INPUT_PURPOSE)
            if purpose != INPUT_PURPOSE:  # before a large file is read
                raise InvalidField(
                    f"purpose must be {INPUT_PURPOSE}, not {purpose!r}.", field="purpose"
                )


async def _store(part: BodyPartReader, upload: Upload, max_bytes: int, limit_s: float) -> None:
    if upload.filename is not None:
        raise InvalidField(
            "file is twice in the form.", field="file", remedy="Send one file at a time."
        )
    # as JSON can hold it: aiohttp keeps bytes that are no UTF-8 in a form that cannot be encoded
    upload.filename = (part.filename or "upload.jsonl")[:255].encode("utf-8", "replace").decode()
    await on_disk(upload.path.touch)
    while chunk := await _in_time(part.read_chunk(CHUNK_BYTES), limit_s):
        upload.bytes += len(chunk)
        if upload.bytes > max_bytes:
            raise FileTooLarge(
                f"The file is over this server's limit of {max_bytes} bytes.",
                remedy="Send it in several files, or raise batches.max_file_bytes.",
            )
        await on_disk(append_whole, upload.path, chunk)


async def _text(part: BodyPartReader, limit_s: float) -> str:
    text = b""
    while chunk := await _in_time(part.read_chunk(), limit_s):
        text += chunk
        if len(text) > MOST_TEXT_BYTES:
            raise InvalidRequest("A field of the form is far too long.", remedy=FORM_REMEDY)
    return text.decode("utf-8", "replace")


async def _in_time(coming: Awaitable[T], limit_s: float) -> T:
    """The limit is for each part: a large file may take longer."""
    try:
        async with asyncio.timeout(limit_s):
            return await coming
    except TimeoutError:
        raise InvalidRequest(
            f"Nothing of the file came for {limit_s:g} s.", remedy="Send it at once."
        ) from None


ENDPOINT = "/v1/chat/completions"
WINDOW = re.compile(r"([1-9][0-9]{0,3})h", re.ASCII)
MAX_LISTED_FILES = 10_000
MOST_UNFINISHED = 100
"""Batches of one tenant."""
JSONL = "application/jsonl"

BATCH_RUNS = web.AppKey("BATCH_RUNS", BatchRuns)
BATCHES = web.AppKey("BATCHES", BatchesSettings)
UPLOADS = web.AppKey("UPLOADS", defaultdict[str, dict[str, int]])
"""Per tenant the most bytes of each upload that runs."""


@contextlib.contextmanager
def attached(config: Config) -> Iterator[Callable[[web.Application], None]]:
    """Lock the deployment's folder and read its pools; gives what adds batches to the application.

    Raises ConfigError where the folder cannot be used, or a pool's name or file is wrong.
    """
    assert config.batches.folder is not None
    with opened_folder(config.batches.folder) as folder:
        pools = loaded_pools(config)

        def add(app: web.Application) -> None:
            runners = {
                name: PoolLines(name, pool, folder.pools, app[SERVICES])
                for name, pool in pools.items()
            }
            add_batches(app, folder, config.batches, runners)

        yield add


def add_batches(
    app: web.Application,
    folder: BatchFolder,
    settings: BatchesSettings,
    pools: Mapping[str, PoolLines],
) -> None:
    """Add the routes, and run batches from the server's start to its stop.

    At the stop lines end at once, for the requests that still run. `pools` answer lines that name
    one as their model.
    """
    runner = ChatLines(app[CHATS], settings.concurrency, pools)
    runs = app[BATCH_RUNS] = BatchRuns(
        folder, runner, app[SERVICES], app[SETTINGS].max_body_bytes, settings.file_ttl_s
    )
    app[BATCHES], app[UPLOADS] = settings, defaultdict[str, dict[str, int]](dict)
    expiring = list[asyncio.Task[None]]()

    async def resume(_: web.Application) -> None:
        runs.resume()
        expiring.append(asyncio.create_task(runs.expire_files(), name="expire-files"))

    async def stop(_: web.Application) -> None:
        expiring[0].cancel()
        await asyncio.wait(expiring)
        await runs.stop()

    app.on_startup.append(resume)
    app.on_shutdown.append(stop)
    app.add_routes(ROUTES)


async def upload_file(request: web.Request) -> web.Response:
    """POST: keep a file."""
    folder = _folder(request)
    id = f"file-{request.app[SERVICES].new_id()}"
    draft = folder.draft(id)
    with _reserved(request, id) as max_bytes:
        try:
            with request.app[DRAIN].deadline():
                upload = await receive(request, draft, max_bytes)
            about = (
                id,
                request[TENANT],
                upload.filename or "",
                upload.texts["purpose"],
                upload.bytes,
            )
            record = FileRecord.made(
                *about, int(request.app[SERVICES].wall()), request.app[BATCHES].file_ttl_s
            )
            await on_disk(keep_as, draft, folder.content(id))
            await folder.files.save(record)
        except (
            StorageFailed,
            asyncio.CancelledError,
        ):  # or the client left, and knows no id to ask for
            with contextlib.suppress(StorageFailed):  # the first one says what is wrong
                await folder.remove(id)
            raise
        finally:
            await on_disk(draft.unlink, missing_ok=True)
    note_ignored(request, upload.ignored)
    return json_reply(request, record.as_json())


@contextlib.contextmanager
def _reserved(request: web.Request, id: str) -> Iterator[int]:
    """The bytes that the upload `id` may have; they count as kept until its end. Raises
    QuotaExceeded.

    Inputs of batches that have not ended count although their files were deleted.
    """
    settings = request.app[BATCHES]
    folder = _folder(request)
    tenant = request[TENANT]
    uploads = request.app[UPLOADS][tenant]
    inputs = {
        batch.input_file_id: batch.input_bytes
        for batch in folder.batches.of(tenant)
        if not batch.ended
    }
    kept = inputs | {file.id: file.bytes for file in folder.files.of(tenant)} | uploads
    size = sum(kept.values())
    if len(kept) >= settings.max_tenant_files or size >= settings.max_tenant_bytes:
        raise QuotaExceeded(
            f"You keep {len(kept)} files of {size} bytes, uploads that run and inputs of batches "
            "included; at most"
            f" {settings.max_tenant_files} files and {settings.max_tenant_bytes} bytes are kept.",
            remedy="Delete some, also results that you have read: DELETE /v1/files/{id}.",
        )
    if "Content-Encoding" in request.headers:
        known = None
    else:
        known = request.content_length
    if known is None:
        most = settings.max_file_bytes
    else:
        most = min(known, settings.max_file_bytes)
    uploads[id] = min(most, settings.max_tenant_bytes - size)
    try:
        yield uploads[id]
    finally:
        del uploads[id]


async def list_files(request: web.Request) -> web.Response:
    """GET: the tenant's files, the latest first unless `order` is asc."""
    purpose = request.query.get("purpose")
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidField("order must be asc or desc.", field="order")
    files = [
        one for one in _folder(request).files.of(request[TENANT]) if purpose in (None, one.purpose)
    ]
    if order == "asc":
        files.reverse()
    return json_reply(
        request, page(files, request.query, default=MAX_LISTED_FILES, most=MAX_LISTED_FILES)
    )


async def show_file(request: web.Request) -> web.Response:
    """GET: what is known of one."""
    return json_reply(request, _file(request).as_json())


async def file_content(request: web.Request) -> web.StreamResponse:
    """GET: what it holds. A client that takes nothing of it for `write_timeout_s` is given up."""
    file = _file(request)
    sizes = {"Content-Length": str(file.bytes)}
    if request.method == "HEAD":
        return web.Response(headers={**common_headers(request), **sizes}, content_type=JSONL)
    with await on_disk(_folder(request).content(file.id).open, "rb") as content:
        stream = await open_stream(request, content_type=JSONL, headers=sizes)
        assert isinstance(stream, EventStream)
        while chunk := await on_disk(content.read, CHUNK_BYTES):
            await stream.send(chunk)
        return await stream.end()


async def delete_file(request: web.Request) -> web.Response:
    """DELETE: forget it."""
    record = _file(request)
    await _folder(request).remove(record.id)
    return json_reply(request, {"id": record.id, "object": "file", "deleted": True})


async def create_batch(request: web.Request) -> web.Response:
    """POST: answer the requests of a file."""
    if request[KEY].models:
        raise Forbidden(
            "The API key is for some models only, and lines may name any.",
            remedy="Use another key.",
        )
    services = request.app[SERVICES]
    body = parse_body(await read_body(request))
    record = read_batch(body, f"batch_{services.new_id()}", request[TENANT], int(services.wall()))
    file = _folder(request).files.find(record.tenant, record.input_file_id)
    if file.purpose != INPUT_PURPOSE:
        raise body.refuse("input_file_id", f"names a file whose purpose is not {INPUT_PURPOSE}")
    body.check_spelling()
    note_ignored(request, body.unread)
    unfinished = sum(not one.ended for one in _folder(request).batches.of(record.tenant))
    if unfinished >= MOST_UNFINISHED:
        raise Overloaded(
            f"{unfinished} of your batches have not ended.",
            remedy="Send larger ones, or wait for them.",
        )
    await request.app[BATCH_RUNS].add(replace(record, input_bytes=file.bytes))
    return json_reply(request, record.as_json())


async def list_batches(request: web.Request) -> web.Response:
    """GET: the tenant's batches, the latest first."""
    batches = _folder(request).batches.of(request[TENANT])
    return json_reply(request, page(batches, request.query, default=20, most=100))


async def show_batch(request: web.Request) -> web.Response:
    """GET: how far one is."""
    return json_reply(request, _batch(request).as_json())


async def cancel_batch(request: web.Request) -> web.Response:
    """POST: end what runs of it; what has been answered stays."""
    record = await request.app[BATCH_RUNS].cancel(_batch(request))
    return json_reply(request, record.as_json())


ROUTES = (
    web.post("/v1/files", upload_file),
    web.get("/v1/files", list_files),
    web.get("/v1/files/{file_id}", show_file),
    web.get("/v1/files/{file_id}/content", file_content),
    web.delete("/v1/files/{file_id}", delete_file),
    web.post("/v1/batches", create_batch),
    web.get("/v1/batches", list_batches),
    web.get("/v1/batches/{batch_id}", show_batch),
    web.post("/v1/batches/{batch_id}/cancel", cancel_batch),
)


def _folder(request: web.Request) -> BatchFolder:
    return request.app[BATCH_RUNS].folder


def _file(request: web.Request) -> FileRecord:
    return _folder(request).files.find(request[TENANT], request.match_info["file_id"])


def _batch(request: web.Request) -> BatchRecord:
    return _folder(request).batches.find(request[TENANT], request.match_info["batch_id"])


def read_batch(body: Fields, id: str, tenant: str, now: int) -> BatchRecord:
    """The batch that a body asks for at `now`, in Unix time. Raises InvalidField."""
    endpoint = body.required_text("endpoint")
    window = body.required_text("completion_window")
    if endpoint != ENDPOINT:
        raise body.refuse("endpoint", f"must be {ENDPOINT}")
    hours = WINDOW.fullmatch(window)
    if hours is None:
        raise body.refuse("completion_window", "must be a number of hours", "Write 24h.")
    input_file_id = body.required_text("input_file_id")
    metadata = body.raw("metadata")
    is_object = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    )
    if metadata is not None and not is_object:
        raise body.refuse("metadata", "must be an object of strings")
    return BatchRecord(
        id, tenant, input_file_id, endpoint, window, now, now + 3600 * int(hours[1]), metadata
    )


def page(
    records: Sequence[FileRecord | BatchRecord],
    query: Mapping[str, str],
    *,
    default: int,
    most: int,
) -> dict[str, Any]:
    """The `limit` records that come after the one named by `after`, as OpenAI's clients ask. Raises
    InvalidField.
    """
    start = 0
    given = query.get("limit", str(default))
    if "after" in query:
        start = next(
            (index for index, record in enumerate(records, 1) if record.id == query["after"]), 0
        )
        if not start:
            raise InvalidField(
                "after names nothing in this list.",
                field="after",
                remedy="Take the last_id of a page.",
            )
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise InvalidField(f"limit must be a whole number from 1 to {most}.", field="limit")
    shown = [record.as_json() for record in records[start : start + int(given)]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + int(given) < len(records),
    }
