"""An SGLang server whose weights can be replaced, as SGLang 0.5.23 replaces them: its routes, and a folder's name."""

from pathlib import Path
from typing import Any

from aiohttp import web

NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."


class SwappingEngine:
    """Answers with the name of its weights' folder and the prompt; refuses prompts longer than 8 tokens.

    `busy` times it does not flush; it replaces no weights while `broken`. With `restarts` it starts again at the next
    prompt, with the weights of its first start.
    """

    def __init__(self, folder: Path, *, busy: int = 0) -> None:
        self.folder = folder
        self.busy = busy
        self.broken = self.restarts = False
        self._first = folder
        self.swaps: list[str] = []
        self.flushed: list[str] = []

    def restart(self) -> None:
        """Have the weights of its first start."""
        self.folder, self.restarts = self._first, False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/generate", self._generate)
        return app

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": str(self.folder)})

    async def _update(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.json_response({"success": False, "message": "out of memory"}, status=400)
        self.folder = Path((await request.json())["model_path"])
        self.swaps.append(self.folder.name)
        return self._flushed({"success": True})

    async def _flush(self, _: web.Request) -> web.Response:
        return self._flushed({})

    def _flushed(self, answer: dict[str, Any]) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({"success": False, "message": NOT_FLUSHED}, status=400)
        self.flushed.append(self.folder.name)
        return web.json_response(answer)

    async def _generate(self, request: web.Request) -> web.Response:
        if self.restarts:
            self.restart()
        ids = (await request.json())["input_ids"]
        if len(ids) > 8:
            return web.json_response({"error": {"message": "longer than the model's context length"}}, status=400)
        meta = {
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": len(ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        return web.json_response({"text": self.folder.name, "output_ids": ids, "meta_info": meta})
