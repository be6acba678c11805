"""Every route of /openapi.json under schemathesis: no 500, answers as described, and nothing left
running.
"""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from shell_router.batch.api.routes import add_batches
from shell_router.batch.api.storage import open_folder
from shell_router.config import BatchesSettings
from shell_router.engines.embedding import HashEmbedder
from tests.fakes.api_server import api, until
from tests.fakes.chat_engines import chat_pair
from tests.fakes.moa import ScriptedMoa

pytestmark = pytest.mark.slow

SETTINGS = hypothesis.settings(
    max_examples=40,
    derandomize=True,
    database=None,
    suppress_health_check=[*hypothesis.HealthCheck],
)
USER = [{"role": "user", "content": "Hi"}]
MEANT = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["small", "duo", "hash"]),
        "messages": st.just(USER),
        "input": st.just("Hi"),
    },
)
"""What is put into a body that has such a field: by chance alone hardly one would name what is
served.
"""


def defects(schemathesis: Any, url: str) -> list[str]:
    """What is wrong with the answers to bodies and parameters that fit the description, and to some
    that do not.
    """
    checks = pytest.importorskip("schemathesis.specs.openapi.checks")
    not_a_server_error = pytest.importorskip("schemathesis.checks").not_a_server_error
    asked = [
        not_a_server_error,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    found = []
    for each in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = each.ok()
        modes = [
            operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode
        ]

        @SETTINGS
        @hypothesis.given(case=st.one_of(modes), meant=MEANT)
        def ask(case: Any, meant: dict[str, Any]) -> None:
            if isinstance(case.body, dict):
                case.body.update(
                    {name: value for name, value in meant.items() if name in case.body}
                )
            case.call_and_validate(checks=asked, timeout=20)

        try:
            ask()
        except BaseExceptionGroup as error:
            found.append(f"{operation.label}: {error.exceptions}")
        except Exception as error:
            found.append(f"{operation.label}: {error!r}")
    return found


async def test_every_described_route_answers_as_described_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schemathesis = pytest.importorskip("schemathesis", reason="the extra `ci` installs it")
    moa = ScriptedMoa()
    with open_folder(tmp_path) as folder:
        async with (
            chat_pair() as at,
            api(
                moa,
                relays={"small": at.pair},
                embedders={"hash": HashEmbedder(8)},
                extend=lambda app: add_batches(app, folder, BatchesSettings(), {}),
            ) as served,
        ):
            assert (await served.get("/health"))[0] == 200
            tasks = asyncio.all_tasks()
            found = await asyncio.to_thread(defects, schemathesis, served.url)
            assert found == [], "\n\n".join(found)
            await until(lambda: not any(engine.running for engine in moa.engines.values()))
            await until(lambda: asyncio.all_tasks() <= tasks)
