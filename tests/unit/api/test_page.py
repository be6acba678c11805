"""The live page's file: what a browser may do with it."""

import re

import pytest

from shell_router.api import ApiSettings, add_page
from shell_router.api.views import policy
from tests.fakes.api_server import api


async def test_the_page_is_served_where_it_is_enabled_and_needs_no_key() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"}), extend=add_page) as served:
        async with served.client.get(served.url + "/ui") as reply:
            assert (reply.status, reply.content_type) == (200, "text/html")
            assert reply.headers["Content-Security-Policy"] == policy(await reply.text())
        async with served.client.get(served.url) as reply:
            assert (reply.status, reply.url.path) == (200, "/ui"), "the address leads to it"
        assert (await served.get("/v1/models"))[0] == 401


async def test_without_the_setting_there_is_no_page() -> None:
    async with api() as served:
        assert (await served.get("/ui"))[0] == 404


def test_a_browser_runs_the_pages_own_script_alone_and_asks_this_router_alone() -> None:
    found = policy("<style>a</style><script>b</script>")
    assert (
        "default-src 'none'; script-src 'sha256-PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0='; "
        "style-src"
    ) in found
    assert "connect-src 'self';" in found
    assert not re.search(r"unsafe|\*|https?:", found)
    assert policy("<style>a</style><script>c</script>") != found


def test_a_page_with_a_second_script_is_refused_since_it_would_not_run() -> None:
    with pytest.raises(ValueError, match="too many values"):
        policy("<style>a</style><script>b</script><script>c</script>")


async def test_a_model_names_its_graph() -> None:
    async with api() as served:
        graph = (await served.get("/v1/models/duo"))[1]["graph"]
        assert graph == {
            "left": {"model": "small", "precursors": []},
            "right": {"model": "medium", "precursors": []},
            "root": {"model": "large", "precursors": ["left", "right"]},
        }
        assert (await served.get("/v1/models/small"))[1]["graph"] == {
            "small": {"model": "small", "precursors": []}
        }
