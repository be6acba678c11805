"""Receiving an uploaded file: from a multipart form to the disk, a chunk at a time."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aiohttp import BodyPartReader, MultipartReader, web

from shell_router.api.batch.disk import append_whole, on_disk
from shell_router.api.batch.records import INPUT_PURPOSE
from shell_router.api.services import SETTINGS
from shell_router.errors import FileTooLarge, InvalidField, InvalidRequest

T = TypeVar("T")

CHUNK_BYTES = 2**18
MOST_TEXT_BYTES = 1024
FORM_REMEDY = "Send multipart/form-data with the fields purpose and file, as OpenAI's clients do."


@dataclass(slots=True)
class Upload:
    """A form that is being read into `path`: its file's name and size, and the other fields that were sent."""

    path: Path
    filename: str | None = None
    bytes: int = 0
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields without effect."""
        return tuple(name for name in self.texts if name != "purpose")


async def receive(request: web.Request, path: Path) -> Upload:
    """Have `path` hold the form's file. Raises InvalidRequest and StorageFailed; `path` may then hold a part of it."""
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("The body is not a form.", remedy=FORM_REMEDY)
    upload = Upload(path)
    try:
        await _read_form(request, await request.multipart(), upload)
    except ValueError as error:
        raise InvalidRequest(f"The form cannot be read: {error}.", remedy=FORM_REMEDY) from None
    if "purpose" not in upload.texts:
        raise InvalidField("purpose is missing.", field="purpose", remedy="Set it to batch.")
    if upload.filename is None:
        raise InvalidField("file is missing.", field="file", remedy=FORM_REMEDY)
    return upload


async def _read_form(request: web.Request, form: MultipartReader, upload: Upload) -> None:
    limit_s = request.app[SETTINGS].body_timeout_s
    while (part := await _in_time(form.next(), limit_s)) is not None:
        if not isinstance(part, BodyPartReader) or part.name is None:
            raise InvalidRequest("The form has a part without a name.", remedy=FORM_REMEDY)
        if part.name == "file":
            await _store(part, upload, request.app[SETTINGS].max_file_bytes, limit_s)
        else:
            upload.texts[part.name] = await _text(part, limit_s)
            _require_purpose(upload)


def _require_purpose(upload: Upload) -> None:
    """As soon as it is known: a large file for nothing is not waited for."""
    purpose = upload.texts.get("purpose", INPUT_PURPOSE)
    if purpose != INPUT_PURPOSE:
        raise InvalidField(f"purpose must be {INPUT_PURPOSE}, not {purpose!r}.", field="purpose")


async def _store(part: BodyPartReader, upload: Upload, most_bytes: int, limit_s: float) -> None:
    if upload.filename is not None:
        raise InvalidField("file stands twice in the form.", field="file", remedy="Send one file at a time.")
    upload.filename = (part.filename or "upload.jsonl")[:255]
    await on_disk(upload.path.touch)
    while chunk := await _in_time(part.read_chunk(CHUNK_BYTES), limit_s):
        upload.bytes += len(chunk)
        if upload.bytes > most_bytes:
            raise FileTooLarge(
                f"The file is over this server's limit of {most_bytes} bytes.",
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
    """A large file may take its time, but something of it must come."""
    try:
        async with asyncio.timeout(limit_s):
            return await coming
    except TimeoutError:
        raise InvalidRequest(f"Nothing of the file came for {limit_s:g} s.", remedy="Send it at once.") from None
