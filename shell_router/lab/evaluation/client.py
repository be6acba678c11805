"""The client of a router that runs, or of a deployment that is started for an evaluation."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlencode

import aiohttp
import orjson

from shell_router.app import load_config, serve_deployment
from shell_router.config import Config, Listen
from shell_router.core.exact_json import NewValues, Values
from shell_router.engines.server_client import describe_failure
from shell_router.errors import (
    EngineError,
    EngineStalled,
    EngineUnreachable,
    ShellRouterError,
    Unauthorized,
    hide_user,
)
from shell_router.lab.evaluation.records import EvaluationOptions, Reply, Setting, read_reply

START_LIMIT_S = 180.0
"""What a router may take to get ready after its start."""
OK = 200
UNAUTHORIZED = 401
UNAVAILABLE = 503


class RouterClient:
    """A client of the router at `url`, on the caller's session; a request may take `limit_s`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        api_key: str | None = None,
        limit_s: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/").removesuffix("/v1")
        self.url = hide_user(self._url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._limit = aiohttp.ClientTimeout(total=limit_s)
        self._clock = clock

    async def wait_until_ready(self, *, limit_s: float = START_LIMIT_S) -> None:
        """Wait for `/ready`.

        Raises EngineUnreachable if nothing listens, and EngineStalled after `limit_s`.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not await self._wait_until_ready():  # noqa: ASYNC110 - readiness over HTTP can only be asked for
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise EngineStalled(
                f"The router at {self.url} was not ready within {limit_s:g} s.",
                remedy="Ask its /ready, or look at its log, for the reason.",
            ) from None

    async def _wait_until_ready(self) -> bool:
        status, _, _ = await self.request("GET", "/ready")
        if status not in (OK, UNAVAILABLE):
            raise _report_no_router(self.url, f"its /ready answered {status}")
        return status == OK

    async def list_settings(self) -> list[Setting]:
        """Return what the router serves, in its order. Raises ShellRouterError."""
        listed, _ = await self.fetch("GET", "/v1/models")
        if not all("kind" in model for model in listed["data"]):
            raise _report_no_router(self.url, "its models have no kind")
        return [
            Setting(model["id"], model["kind"], model.get("engine", ""))
            for model in listed["data"]
            if model["kind"] != "embedder"
        ]

    async def ask(self, body: Values) -> Reply:
        """Return the reply to a chat completion's `body`; its trace is fetched untimed."""
        sent_s = self._clock()
        completion, headers = await self.fetch("POST", "/v1/chat/completions", body)
        latency_s = self._clock() - sent_s
        return read_reply(completion, await self.trace(headers["x-trace-id"]), latency_s)

    async def trace(self, trace_id: str) -> Values:
        """Fetch a request's trace. Raises ShellRouterError."""
        return (await self.fetch("GET", f"/v1/traces/{quote(trace_id, safe='')}"))[0]

    async def traces(self, filters: Mapping[str, str]) -> Sequence[Values]:
        """Fetch the latest requests, the last first. Raises ShellRouterError."""
        listed, _ = await self.fetch("GET", f"/v1/traces?{urlencode(filters)}")
        traces: Sequence[Values] = listed["data"]
        return traces

    async def fetch(
        self,
        method: str,
        path: str,
        body: Values | None = None,
        form: aiohttp.FormData | None = None,
    ) -> tuple[NewValues, Mapping[str, str]]:
        """Fetch an object and its headers. Raises ShellRouterError with the router's own words."""
        status, answer, headers = await self.request(method, path, body, form)
        try:
            content = orjson.loads(answer)
        except orjson.JSONDecodeError:
            content = None
        if status == OK and isinstance(content, dict):
            return content, headers
        match content:
            case {"error": {"message": message}}:
                words = str(message)
            case _:
                words = repr(answer[:200])
        if status == UNAUTHORIZED:
            raise Unauthorized(
                words, remedy="Name the variable that holds the key with --api-key-env."
            )
        raise ShellRouterError(f"The router answered {status}: {words}")

    async def request(
        self,
        method: str,
        path: str,
        body: Values | None = None,
        form: aiohttp.FormData | None = None,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Return status, content and headers. Raises EngineError if the router does not answer."""
        try:
            async with self._session.request(
                method,
                self._url + path,
                json=body,
                data=form,
                headers=self._headers,
                timeout=self._limit,
            ) as response:
                return response.status, await response.read(), response.headers
        except aiohttp.ClientError as error:
            raise EngineUnreachable(
                f"No answer from a router at {self.url}: {describe_failure(error)}.",
                remedy="Start one, or correct the URL.",
            ) from error
        except TimeoutError:
            raise EngineStalled(
                f"The router did not answer within {self._limit.total:g} s.",
                remedy="Allow more with --timeout-s.",
            ) from None


def _report_no_router(url: str, why: str) -> ShellRouterError:
    return ShellRouterError(
        f"What listens at {url} is no shell-router: {why}.", remedy="Correct the URL."
    )


@asynccontextmanager
async def connect_router(
    options: EvaluationOptions, on_progress: Callable[[str], None]
) -> AsyncIterator[tuple[RouterClient, Sequence[str]]]:
    """Yield a client of a running or started router, with its models in the order of the file.

    `on_progress` gets a line per step of a start. Raises ConfigError and EngineError.
    """
    async with AsyncExitStack() as stack:
        url = options.url
        models: Sequence[str] = ()
        if url is None:
            assert options.config is not None
            # on a free port, and without keys, which only callers on other machines would need
            config = load_config(options.config, os.environ, with_keys=False)
            config = replace(
                config,
                listen=Listen(port=0, ui=config.listen.ui),
                api_keys={},
                api_keys_file=None,
                topologies=options.topologies or config.topologies,
            )
            url = await _start_deployment(config, options.config, stack, on_progress)
            models = tuple(config.models)
        connector = aiohttp.TCPConnector(limit=0)  # all members of a vote ask at the same time
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = RouterClient(session, url, api_key=options.api_key, limit_s=options.limit_s)
        await client.wait_until_ready(limit_s=START_LIMIT_S)
        yield client, models


async def _start_deployment(
    config: Config, file: Path, stack: AsyncExitStack, on_progress: Callable[[str], None]
) -> str:
    """Start the deployment, which ends with `stack`, and return its URL."""
    launching = ""
    if any(at.launch for model in config.models.values() for at in model.sglang):
        command = f"shell-router launch --config {file} --engines-only"
        launching = f"Engines with `launch` have to run already: `{command}` starts them."
        on_progress(launching)
    try:
        return await stack.enter_async_context(serve_deployment(config, on_progress=on_progress))
    except EngineError as error:
        if not launching:
            raise
        raise EngineUnreachable(str(error), remedy=launching) from error
