"""The real SGLang pair, started once for all tests that ask for it, and a summary of what they
measured.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from benchmarks.random_checkpoint import make_checkpoint
from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair, cpu_server
from shell_router.engines.address import PairAddress, ServerAddress
from shell_router.standins.embedded.fleet import preload_servers
from tests.fakes.pairs_under_test import SGLANG_VARIABLES, PairUnderTest, address_of, of_model
from tests.fakes.shared_engines import SharedEngines, shared_engines
from tests.fakes.thinking_model import with_template

RUN_COMMAND = f"{BUILD_COMMAND} && python -m pytest -m sglang"
UNTIMED = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
"""No test asserts a time: the machine is shared."""
hypothesis.settings.register_profile("few", UNTIMED, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("many", UNTIMED, max_examples=400, derandomize=True)
hypothesis.settings.register_profile("fresh", UNTIMED, max_examples=400)
hypothesis.settings.load_profile("few")

MEASURED = "measured"
"""The user property of a test that holds a line of what it measured."""
MOST_WORKERS = 4


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A worker for each core, and none for chosen files or tests on real SGLang.

    A pair of SGLang takes 5 GB. Each worker starts embedded engines of its own.
    """
    starts_sglang = "sglang" in config.option.markexpr.replace("not sglang", "")
    names_files = any(not Path(name.partition("::")[0]).is_dir() for name in config.args)
    if starts_sglang or names_files or config.option.collectonly:
        return 0
    return min(os.cpu_count() or 1, MOST_WORKERS)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """Embedded pairs for all tests; the first that asks waits for torch to be imported."""
    with shared_engines(tmp_path_factory.mktemp("engines")) as engines:
        yield engines


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model that the pair serves; its context has room for outputs that
    outlast a test.
    """
    return with_template(
        make_checkpoint(tmp_path_factory.mktemp("sglang-model"), seed=1, context_length=32768)
    )


@pytest.fixture(scope="session")
def own_sglang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuPair]:
    """A real SGLang pair on this machine's CPU, whose servers a test may kill as long as it starts
    them again.
    """
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {RUN_COMMAND}")
    model: Path = request.getfixturevalue("sglang_model")
    # a long prompt then leaves time to break something while it prefills
    options = ("--chunked-prefill-size", "512", "--tool-call-parser", "qwen25")
    folder = tmp_path_factory.mktemp("sglang")
    with cpu_pair(
        model, venv, folder, options=options, drafts=True, progress=_uncaptured(request.config)
    ) as pair:
        yield pair


@pytest.fixture(scope="session")
def own_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """A real undivided SGLang server, which a test may kill as long as it starts it again."""
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {RUN_COMMAND}")
    model: Path = request.getfixturevalue("sglang_model")
    options = ("--chunked-prefill-size", "512", "--tool-call-parser", "qwen25")
    folder = tmp_path_factory.mktemp("sglang-server")
    progress = _uncaptured(request.config)
    with cpu_server(model, venv, folder, options=options, drafts=True, progress=progress) as server:
        yield server


@pytest.fixture(scope="session")
def real_sglang(request: pytest.FixtureRequest) -> PairUnderTest:
    """The pair that SHELL_ROUTER_SGLANG_* name, which may be anywhere; else one of our own.

    With the parameter `server` an undivided server.
    """
    if getattr(request, "param", "pair") == "server":
        server: EngineServer = request.getfixturevalue("own_server")
        return of_model(ServerAddress(server.url), request.getfixturevalue("sglang_model"))
    prefill_url, decode_url, port, model = (os.environ.get(name) for name in SGLANG_VARIABLES)
    if prefill_url and decode_url and port and model:
        return of_model(PairAddress(prefill_url, decode_url, "127.0.0.1", int(port)), Path(model))
    own: CpuPair = request.getfixturevalue("own_sglang")
    return of_model(address_of(own), request.getfixturevalue("sglang_model"))


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Reports a time in seconds at the end of the run. No test asserts one: the machine is
    shared."""

    def note(what: str, seconds: float) -> None:
        request.node.user_properties.append((MEASURED, f"{what}: {1000 * seconds:.0f} ms"))

    return note


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare the fork server for engines, and let networks compute on one thread.

    Threads that share a busy machine make tiny products a hundred times as slow.
    """
    if any("engines" in getattr(item, "fixturenames", ()) for item in session.items):
        preload_servers()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        line
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, line in report.user_properties
        if name == MEASURED and report.when == "call"
    ]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)


def _uncaptured(config: pytest.Config) -> Callable[[str], None]:
    """Prints a line while output is captured: a pair takes a minute to start, and silence looks
    like a hang.
    """
    capture = config.pluginmanager.getplugin("capturemanager")
    terminal = config.pluginmanager.getplugin("terminalreporter")

    def say(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.write_line(line)

    return say
