"""The plugin's decisions, without SGLang; tests/sglang has it inside the real one."""

import logging
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest

from shell_router import sglang_plugin
from shell_router.sglang_plugin.compatibility import is_supported
from shell_router.sglang_plugin.experts import PLACEMENT, RECORD_FILE
from shell_router.sglang_plugin.patches import (
    FAKE_BOOTSTRAP_HOST,
    PREFILL_ONLY_PORT,
    index_on_host_without_cuda,
    keep_prefill_only_kv,
)
from shell_router.sglang_plugin.routes import make_prefill_only, report_capabilities


@dataclass
class Request:
    """What the hooks read of SGLang's `Req` and `GenerateReqInput`."""

    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    positional_embed_overrides: object = None
    skip_radix_cache_insert: bool = True
    sampling_params: Any = None
    stream: bool = True


@dataclass(frozen=True)
class ServerArguments:
    disaggregation_mode: str = "prefill"
    disable_radix_cache: bool = False
    expert_distribution_recorder_mode: str | None = None
    enable_two_batch_overlap: bool = False
    speculative_algorithm: str | None = None
    enable_eplb: bool = False
    ep_num_redundant_experts: int = 0
    elastic_ep_backend: str | None = None
    model_path: str = "small"


def test_a_prefill_only_request_may_enter_the_cache() -> None:
    request = make_prefill_only(Request(), 5)
    keep_prefill_only_kv(None, request)
    assert not request.skip_radix_cache_insert


@pytest.mark.parametrize(
    "request_",
    [
        Request(FAKE_BOOTSTRAP_HOST, None),
        Request(FAKE_BOOTSTRAP_HOST, 8998),
        Request("127.0.0.1", PREFILL_ONLY_PORT),
        Request(None, None),
        Request(FAKE_BOOTSTRAP_HOST, PREFILL_ONLY_PORT, positional_embed_overrides=object()),
    ],
)
def test_every_other_request_stays_as_it_was(request_: Request) -> None:
    keep_prefill_only_kv(None, request_)
    assert request_.skip_radix_cache_insert


def test_the_mark_is_not_a_valid_port() -> None:
    assert PREFILL_ONLY_PORT < 0


@pytest.mark.parametrize(
    "sampling", [None, {}, {"max_new_tokens": 50, "min_new_tokens": 9, "temperature": 0.5}]
)
def test_a_prefill_only_body_asks_for_one_token_and_no_stream(
    sampling: dict[str, Any] | None,
) -> None:
    body = make_prefill_only(Request(sampling_params=sampling), 5)
    assert body.sampling_params == {**(sampling or {}), "max_new_tokens": 1, "min_new_tokens": 0}
    assert (body.stream, body.bootstrap_room) == (False, 5)


def test_each_request_of_a_batch_asks_for_one_token() -> None:
    body = make_prefill_only(Request(sampling_params=[{"top_k": 1}, {}]), 5)
    assert [one["max_new_tokens"] for one in body.sampling_params] == [1, 1]


def test_a_room_that_was_chosen_is_kept() -> None:
    assert make_prefill_only(Request(bootstrap_room=77), 5).bootstrap_room == 77


@pytest.mark.parametrize(
    ("mode", "no_cache", "offered"),
    [("prefill", False, True), ("prefill", True, False), ("decode", True, False)],
)
def test_capabilities_offer_prefill_only_where_there_is_a_cache_to_fill(
    mode: str, no_cache: bool, offered: bool
) -> None:
    found = report_capabilities(ServerArguments(mode, no_cache), "0.5.23")
    assert (found["disaggregation_mode"], found["prefill_only"], found["sglang_version"]) == (
        mode,
        offered,
        "0.5.23",
    )


def test_capabilities_offer_no_placement_where_sglang_lacks_names() -> None:
    """Here no SGLang is installed at all."""
    eplb = ServerArguments(
        "null", False, expert_distribution_recorder_mode="stat", enable_eplb=True
    )
    found = report_capabilities(eplb, "0.5.99", {PLACEMENT: "swap", RECORD_FILE: "record.npz"})
    assert not found["expert_placement"] and not found["expert_record"]


@pytest.mark.parametrize(
    "version", ["0.5.16", "0.5.16.post1", "0.5.23", "0.5.30.dev7+gabc", "0.5.100"]
)
def test_supported_versions(version: str) -> None:
    assert is_supported(version)


@pytest.mark.parametrize(
    "version", ["0.5.15", "0.5.15.post1", "0.4.99", "0.6", "0.6.0rc1", "1.0.0", "unknown", ""]
)
def test_versions_that_are_not_supported(version: str) -> None:
    assert not is_supported(version)


def test_under_another_sglang_it_says_so_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Here no SGLang is installed at all."""
    assert sglang_plugin.find_sglang_version() == "unknown"
    with caplog.at_level(logging.ERROR):
        sglang_plugin.register()
    assert "supports sglang >=0.5.16,<0.6, not unknown" in caplog.text


def test_importing_it_loads_nothing_heavy_and_of_the_router_what_drafts() -> None:
    code = (
        "import sys, shell_router.sglang_plugin as plugin; "
        "heavy = {'torch', 'aiohttp', 'numpy', 'sglang', 'fastapi', 'orjson'} & set(sys.modules); "
        "router = [n for n in sys.modules if n.startswith('shell_router.') and 'sglang_plugin' "
        "not in n]; "
        "print(heavy, sorted(router))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set() ['shell_router.core', 'shell_router.core.drafts']"


def test_classes_that_index_elsewhere_are_left_alone() -> None:
    class Sender:
        supports_host_tensor_indices = False

    class Role(Enum):
        OTHER = 1

    for found in (Sender, Role, None):
        index_on_host_without_cuda(found)
    assert Sender.supports_host_tensor_indices is False
