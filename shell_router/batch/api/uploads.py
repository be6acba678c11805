"""Uploaded files: the tenant's quota, and from a multipart form to the disk, a chunk at a time."""

import asyncio
import contextlib
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aiohttp import BodyPartReader, MultipartReader
from aiohttp.http_exceptions import BadHttpMessage

from shell_router.api.services import SETTINGS
from shell_router.batch.api.storage import INPUT_PURPOSE, BatchFolder, on_disk
from shell_router.batch.journal import append_whole
from shell_router.config import BatchesSettings
from shell_router.errors import FileTooLarge, InvalidField, InvalidRequest, QuotaExceeded
from shell_router.http.app import Request

T = TypeVar("T")

CHUNK_BYTES = 2**18
MAX_TEXT_BYTES = 1024
MAX_FIELDS = 16
UNREADABLE = (ValueError, LookupError, RuntimeError, AssertionError, BadHttpMessage, zlib.error)
"""Errors that aiohttp raises for parts with odd headers, encodings and ends."""
FORM_REMEDY = "Send multipart/form-data with the fields purpose and file, as OpenAI's clients do."


@dataclass(frozen=True, slots=True)
class UploadQuota:
    """The files and bytes that each tenant may keep; running uploads count."""

    folder: BatchFolder
    settings: BatchesSettings
    _running: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """The most bytes of each running upload, per tenant and file id."""

    @contextlib.contextmanager
    def reserve(self, tenant: str, file_id: str, size: int | None) -> Iterator[int]:
        """Yield the most bytes that an upload of `size` bytes may have; None is an unknown size.

        They count as kept while the context is open. The inputs of batches that have not ended
        count although their files were deleted. Raises QuotaExceeded.
        """
        settings = self.settings
        running = self._running[tenant]
        kept = {
            batch.input_file_id: batch.input_bytes
            for batch in self.folder.batches.of(tenant)
            if not batch.ended
        }
        kept |= {file.id: file.bytes for file in self.folder.files.of(tenant)}
        kept |= running
        kept_bytes = sum(kept.values())
        if len(kept) >= settings.max_tenant_files or kept_bytes >= settings.max_tenant_bytes:
            raise QuotaExceeded(
                f"You keep {len(kept)} files of {kept_bytes} bytes, uploads that run and inputs of "
                f"batches included; at most {settings.max_tenant_files} files and "
                f"{settings.max_tenant_bytes} bytes are kept.",
                remedy="Delete some, also results that you have read: DELETE /v1/files/{id}.",
            )
        free_bytes = settings.max_tenant_bytes - kept_bytes
        max_bytes = min(settings.max_file_bytes, free_bytes)
        if size is not None:
            max_bytes = min(max_bytes, size)
        running[file_id] = max_bytes
        try:
            yield max_bytes
        finally:
            del running[file_id]


@dataclass(slots=True)
class Upload:
    """A form that is being read: its file, written to `path`, and the other fields' texts."""

    path: Path
    filename: str | None = None
    bytes: int = 0
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields without effect."""
        return tuple(name for name in self.texts if name != "purpose")


async def receive_upload(request: Request, path: Path, max_bytes: int) -> Upload:
    """Write the form's file of at most `max_bytes` to `path`.

    Raises InvalidRequest and StorageFailed; `path` may then hold a part of the file.
    """
    if request.content_type != "multipart/form-data":
        raise InvalidRequest("The body is not a form.", remedy=FORM_REMEDY)
    upload = Upload(path)
    limit_s = request.app[SETTINGS].body_timeout_s
    try:
        await _read_form(await request.form(), upload, max_bytes, limit_s)
    except UNREADABLE as error:
        raise InvalidRequest(f"The form cannot be read: {error}.", remedy=FORM_REMEDY) from None
    if "purpose" not in upload.texts:
        raise InvalidField("purpose is missing.", field="purpose", remedy="Set it to batch.")
    if upload.filename is None:
        raise InvalidField("file is missing.", field="file", remedy=FORM_REMEDY)
    return upload


async def _read_form(form: MultipartReader, upload: Upload, max_bytes: int, limit_s: float) -> None:
    while (part := await _wait_for(form.next(), limit_s)) is not None:
        if not isinstance(part, BodyPartReader) or part.name is None:
            raise InvalidRequest("The form has a part without a name.", remedy=FORM_REMEDY)
        if len(upload.texts) == MAX_FIELDS or len(part.name) > MAX_TEXT_BYTES:
            raise InvalidRequest(
                f"The form has more than {MAX_FIELDS} fields, or a long one.", remedy=FORM_REMEDY
            )
        if part.name == "file":
            await _store_file(part, upload, max_bytes, limit_s)
        else:
            upload.texts[part.name] = await _read_text(part, limit_s)
            purpose = upload.texts.get("purpose", INPUT_PURPOSE)
            if purpose != INPUT_PURPOSE:  # before a large file is read
                raise InvalidField(
                    f"purpose must be {INPUT_PURPOSE}, not {purpose!r}.", field="purpose"
                )


async def _store_file(part: BodyPartReader, upload: Upload, max_bytes: int, limit_s: float) -> None:
    if upload.filename is not None:
        raise InvalidField(
            "file is twice in the form.", field="file", remedy="Send one file at a time."
        )
    # aiohttp keeps bytes that are no UTF-8 in a form that JSON cannot hold
    upload.filename = (part.filename or "upload.jsonl")[:255].encode("utf-8", "replace").decode()
    await on_disk(upload.path.touch, mode=0o600)
    while chunk := await _wait_for(part.read_chunk(CHUNK_BYTES), limit_s):
        upload.bytes += len(chunk)
        if upload.bytes > max_bytes:
            raise FileTooLarge(
                f"The file is over this server's limit of {max_bytes} bytes.",
                remedy="Send it in several files, or raise batches.max_file_bytes.",
            )
        await on_disk(append_whole, upload.path, chunk)


async def _read_text(part: BodyPartReader, limit_s: float) -> str:
    text = b""
    while chunk := await _wait_for(part.read_chunk(), limit_s):
        text += chunk
        if len(text) > MAX_TEXT_BYTES:
            raise InvalidRequest("A field of the form is far too long.", remedy=FORM_REMEDY)
    return text.decode("utf-8", "replace")


async def _wait_for(part: Awaitable[T], limit_s: float) -> T:
    """Wait for one part of the form; a large file has many and may take longer in all."""
    try:
        async with asyncio.timeout(limit_s):
            return await part
    except TimeoutError:
        raise InvalidRequest(
            f"Nothing of the file came for {limit_s:g} s.", remedy="Send it at once."
        ) from None
