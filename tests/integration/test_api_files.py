"""Files over a socket: uploads, lists, contents, and what is refused."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest

from shell_router.api import ApiSettings
from shell_router.config import BatchesSettings
from tests.fakes.api_server import batch_api, questions, until

LONG = b"x" * 3 * 2**20


def kept(folder: Path) -> set[str]:
    """The kinds of what lies in the folder of the files."""
    return {path.suffix for path in (folder / "files").iterdir()}


def file_modes(folder: Path) -> dict[str, int]:
    """The permissions of every file below the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.stat().st_mode & 0o777 for path in files}


async def test_a_file_is_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    async with batch_api(tmp_path, settings=ApiSettings(max_body_bytes=2**20)) as router:
        file = await router.ai.files.create(file=("in.jsonl", LONG), purpose="batch")
        assert (file.bytes, file.filename, file.purpose, file.object) == (
            len(LONG),
            "in.jsonl",
            "batch",
            "file",
        )
        assert await router.ai.files.retrieve(file.id) == file
        assert (await router.ai.files.content(file.id)).content == LONG
        assert (await router.ai.files.delete(file.id)).deleted
        assert not kept(tmp_path)
        with pytest.raises(openai.NotFoundError, match="GET /v1/files lists yours"):
            await router.ai.files.content(file.id)


async def test_files_of_batches_are_the_owners_alone(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        batch = await router.ended(await router.begin(*questions("small", "missing")))
        assert batch.status == "completed"
    modes = file_modes(tmp_path)  # now that no file is written or replaced any more
    assert len(modes) >= 4
    assert set(modes.values()) == {0o600}, modes


async def test_files_outlive_the_router(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        id = await router.upload(b"{}")
    async with batch_api(tmp_path) as router:
        assert (await router.ai.files.content(id)).content == b"{}"


async def test_lists_come_a_page_at_a_time_the_latest_first(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        ids = [await router.upload(b"{}") for _ in range(5)]
        files = router.ai.files
        assert [one.id async for one in files.list(limit=2)] == ids[::-1]
        assert [one.id async for one in files.list(limit=2, order="asc", purpose="batch")] == ids
        assert [one async for one in files.list(purpose="batch_output")] == []
        first = await files.list(limit=2)
        assert [one.id for one in first.data] == ids[:2:-1] and first.has_more


@pytest.mark.parametrize(
    ("query", "named"), [("limit=0", "limit"), ("limit=x", "limit"), ("after=no", "after")]
)
async def test_an_impossible_page_is_refused_by_field(
    tmp_path: Path, query: str, named: str
) -> None:
    async with batch_api(tmp_path) as router:
        for list_of in ("files", "batches"):
            status, body = await router.served.get(f"/v1/{list_of}?{query}")
            assert (status, body["error"]["param"]) == (400, named)


async def test_a_file_over_the_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with batch_api(tmp_path, batches=BatchesSettings(max_file_bytes=2**20)) as router:
        with pytest.raises(
            openai.APIStatusError, match=r"raise batches\.max_file_bytes"
        ) as refused:
            await router.upload(LONG)
        assert refused.value.status_code == 413
        assert not kept(tmp_path)


async def test_another_purpose_is_refused(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        with pytest.raises(openai.BadRequestError, match="purpose must be batch, not 'fine-tune'"):
            await router.ai.files.create(file=b"{}", purpose="fine-tune")
        assert not kept(tmp_path)


FORM = "multipart/form-data; boundary=b"
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
ENDLESS = PURPOSE.replace(b"batch", b"b" * 4096)
NAMELESS = b"--b\r\nContent-Type: text/plain\r\n\r\n{}\r\n"


@pytest.mark.parametrize(
    ("content_type", "body", "says"),
    [
        ("application/json", b"{}", "The body is not a form. Send multipart/form-data"),
        ("multipart/form-data", FILE, "The form cannot be read"),
        (FORM, b"", "The form cannot be read"),
        (FORM, b"not a form", "The form cannot be read"),
        (FORM, PURPOSE + FILE[:-2], "The form cannot be read"),
        (FORM, PURPOSE + b"--b--\r\n", "file is missing"),
        (FORM, FILE + b"--b--\r\n", "purpose is missing"),
        (FORM, PURPOSE + FILE + FILE + b"--b--\r\n", "file is twice"),
        (FORM, ENDLESS + b"--b--\r\n", "far too long"),
        (FORM, NAMELESS + b"--b--\r\n", "a part without a name"),
    ],
)
async def test_what_is_no_right_form_is_refused_and_leaves_nothing(
    tmp_path: Path, content_type: str, body: bytes, says: str
) -> None:
    async with batch_api(tmp_path) as router:
        headers = {"Content-Type": content_type}
        url = f"{router.served.url}/v1/files"
        async with router.served.client.post(url, data=body, headers=headers) as response:
            error = (await response.json())["error"]
            assert response.status == 400 and says in error["message"]
        assert not kept(tmp_path)


async def test_fields_may_come_in_any_order_and_unknown_ones_are_named(tmp_path: Path) -> None:
    form = aiohttp.FormData({"expires_after[seconds]": "3600"})
    form.add_field("file", b"{}", filename="late.jsonl")
    form.add_field("purpose", "batch")
    async with batch_api(tmp_path) as router:
        response = await router.served.client.post(f"{router.served.url}/v1/files", data=form)
        assert response.status == 200 and (await response.json())["filename"] == "late.jsonl"
        assert response.headers["x-ignored-fields"] == "expires_after?seconds?"


async def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with batch_api(tmp_path) as router, aiohttp.ClientSession() as leaving:
        stored = asyncio.Event()

        async def half() -> AsyncIterator[bytes]:
            yield PURPOSE + FILE[:-2] + b"{}\n" * 100_000
            await until(lambda: kept(tmp_path) == {".part"})
            stored.set()
            await asyncio.Event().wait()

        sending = asyncio.ensure_future(
            leaving.post(
                f"{router.served.url}/v1/files", data=half(), headers={"Content-Type": FORM}
            )
        )
        await stored.wait()
        sending.cancel()
        await until(lambda: not kept(tmp_path))


async def test_a_file_that_stops_coming_is_given_up(tmp_path: Path) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield PURPOSE + FILE[:-2]
        await asyncio.Event().wait()

    async with batch_api(tmp_path, settings=ApiSettings(body_timeout_s=0.05)) as router:
        url, headers = f"{router.served.url}/v1/files", {"Content-Type": FORM}
        async with router.served.client.post(url, data=half(), headers=headers) as response:
            assert response.status == 400 and "Nothing of the file came" in await response.text()
        assert not kept(tmp_path)


async def test_a_file_that_cannot_be_stored_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        shutil.rmtree(tmp_path / "files")
        with pytest.raises(
            openai.InternalServerError, match=r"No such file or directory.*batches\.folder"
        ) as failed:
            await router.upload(b"{}")
        assert failed.value.status_code == 507


async def test_a_file_whose_record_cannot_be_stored_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with batch_api(tmp_path, new_id=lambda: "1") as router:
        in_the_way = tmp_path / "files" / "file-1.tmp"
        in_the_way.mkdir()
        with pytest.raises(openai.InternalServerError, match=r"batches\.folder") as failed:
            await router.upload(b"{}")
        assert failed.value.status_code == 507
        assert list((tmp_path / "files").iterdir()) == [in_the_way]
        with pytest.raises(openai.NotFoundError):
            await router.ai.files.retrieve("file-1")
        in_the_way.rmdir()
        assert await router.upload(b"{}") == "file-1"


async def test_an_upload_that_outlasts_the_router_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    stored, stopped = asyncio.Event(), asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield PURPOSE + FILE[:-2] + b"{}\n" * 100_000
        await until(lambda: kept(tmp_path) == {".part"})
        stored.set()
        await stopped.wait()

    async with aiohttp.ClientSession() as client:
        async with batch_api(tmp_path, drain_s=0) as router:
            url, headers = f"{router.served.url}/v1/files", {"Content-Type": FORM}
            sending = asyncio.ensure_future(client.post(url, data=half(), headers=headers))
            await stored.wait()
        response = await sending
        assert response.status == 503 and "stop" in await response.text()
        stopped.set()
    assert not kept(tmp_path)


async def test_what_a_killed_router_left_half_uploaded_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-x.part").touch()
    async with batch_api(tmp_path):
        assert not kept(tmp_path)


@pytest.mark.parametrize("id", ["..%2Fbatches%2Fx", "%2Fetc%2Fpasswd", "file-x"])
async def test_an_id_never_becomes_a_path(tmp_path: Path, id: str) -> None:
    async with batch_api(tmp_path) as router:
        assert (await router.served.get(f"/v1/files/{id}/content"))[1]["error"][
            "code"
        ] == "unknown_file"


async def test_uploads_that_run_at_once_keep_no_more_than_the_quota(tmp_path: Path) -> None:
    quota = BatchesSettings(max_tenant_bytes=2**20, max_tenant_files=5)
    async with batch_api(tmp_path, batches=quota) as router:
        uploads = (router.upload(b"x" * 900_000) for _ in range(12))
        done = await asyncio.gather(*uploads, return_exceptions=True)
        assert sum(isinstance(one, str) for one in done) == 1
        assert all(
            one.status_code in (403, 413) for one in done if isinstance(one, openai.APIStatusError)
        )
        await router.ai.files.delete(next(one for one in done if isinstance(one, str)))
        small = await asyncio.gather(
            *(router.upload(b"{}") for _ in range(12)), return_exceptions=True
        )
        assert sum(isinstance(one, str) for one in small) == 5


async def test_an_upload_of_unknown_size_may_fill_the_quota_while_it_runs(tmp_path: Path) -> None:
    stored, others = asyncio.Event(), asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield PURPOSE + FILE[:-2] + b"{}\n" * 100_000
        await until(lambda: kept(tmp_path) == {".part"})
        stored.set()
        await others.wait()
        yield b"\r\n--b--\r\n"

    async with batch_api(tmp_path, batches=BatchesSettings(max_tenant_bytes=2**20)) as router:
        url, headers = f"{router.served.url}/v1/files", {"Content-Type": FORM}
        sending = asyncio.ensure_future(
            router.served.client.post(url, data=half(), headers=headers)
        )
        await stored.wait()
        with pytest.raises(openai.PermissionDeniedError, match="uploads that run"):
            await router.upload(b"{}")
        others.set()
        assert (await sending).status == 200
        await router.upload(b"{}")


async def test_a_client_that_takes_nothing_of_a_file_is_given_up(tmp_path: Path) -> None:
    """The buffers of both ends are set, because a system may let them grow beyond the file."""
    settings = ApiSettings(max_body_bytes=2**20, write_timeout_s=0.2)
    async with batch_api(tmp_path, settings=settings, send_buffer_bytes=2**16) as router:
        id = await router.upload(b"x" * 4 * 2**20)
        host, port = router.served.url.removeprefix("http://").split(":")
        with socket.socket() as taking_nothing:
            taking_nothing.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            taking_nothing.setblocking(False)
            await asyncio.get_running_loop().sock_connect(taking_nothing, (host, int(port)))
            taking_nothing.send(
                f"GET /v1/files/{id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
            metrics, left = (
                router.served.services.metrics.registry,
                ("/v1/files/{file_id}/content", "499"),
            )
            name, labels = (
                "shell_router_http_requests_total",
                dict(zip(("route", "status"), left, strict=True)),
            )
            await until(lambda: metrics.get_sample_value(name, labels) == 1)
        assert len((await router.ai.files.content(id)).content) == 4 * 2**20


async def test_the_head_of_a_file_says_its_size(tmp_path: Path) -> None:
    async with batch_api(tmp_path) as router:
        id = await router.upload(b"{}")
        async with router.served.client.head(
            f"{router.served.url}/v1/files/{id}/content"
        ) as answer:
            assert (answer.status, answer.headers["Content-Length"]) == (200, "2")


async def test_files_are_deleted_when_they_expire(tmp_path: Path) -> None:
    hours = BatchesSettings(file_ttl_s=3600)
    async with batch_api(tmp_path, batches=hours, wall=lambda: 1000.0) as router:
        file = await router.ai.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert file.expires_at == 4600
    async with batch_api(tmp_path, wall=lambda: 4599.0) as router:
        assert [one.id async for one in router.ai.files.list()] == [file.id]
        kept_one = await router.upload(b"{}")
    async with batch_api(tmp_path, wall=lambda: 4600.0) as router:
        await until(lambda: len(kept_names(tmp_path)) == 1)
        assert [one.id async for one in router.ai.files.list()] == [kept_one]
        with pytest.raises(openai.NotFoundError):
            await router.ai.files.content(file.id)


def kept_names(folder: Path) -> set[str]:
    """The files that lie in the folder of the files."""
    return {path.stem for path in (folder / "files").iterdir()}
