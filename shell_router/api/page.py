"""The live page, `GET /ui`: one static file for every caller, which asks the API with the caller's own key."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from aiohttp import web

from shell_router.api.replies import common_headers

PAGE = web.AppKey("PAGE", str)


def add_page(app: web.Application) -> None:
    """Serve the page."""
    app[PAGE] = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    app.add_routes([PAGE_ROUTE])


async def show_page(request: web.Request) -> web.Response:
    """The page, which may run its own script, load nothing, and connect to this router alone."""
    page = request.app[PAGE]
    headers = {"Content-Security-Policy": policy(page), "X-Content-Type-Options": "nosniff"}
    return web.Response(text=page, content_type="text/html", headers={**common_headers(request), **headers})


def policy(page: str) -> str:
    """The content security policy of a page whose one script and one style are inside of it."""

    def hashed(tag: str) -> str:
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )


PAGE_ROUTE = web.get("/ui", show_page)
