"""What the plugin does where SGLang lacks a name that it needs: a stand-in of SGLang, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shell_router.sglang_plugin.experts import RECORD_FILE

SGLANG = {
    "managers/schedule_batch.py": """
class Req:
    def __init__(self, bootstrap_host, bootstrap_port):
        self.bootstrap_host, self.bootstrap_port = bootstrap_host, bootstrap_port
        self.positional_embed_overrides = None
        self.skip_radix_cache_insert = True
""",
    "managers/schedule_policy.py": """
class SchedulePolicy:
    def calc_priority(self): ...
""",
    "disaggregation/utils.py": "def get_kv_class(): ...",
    "disaggregation/base.py": "class KVPoll: Failed = 0",
    "disaggregation/common/conn.py": """
class CommonKVManager:
    def check_status(self, room): ...
""",
    "entrypoints/http_server.py": """
class GenerateReqInput: bootstrap_host = bootstrap_port = bootstrap_room = None
class app:
    def add_api_route(self): ...
def generate_request(): ...
def launch_server(): ...
""",
    "server_args.py": """
class ServerArgs:
    disaggregation_mode = disable_radix_cache = tokenizer_worker_num = None
    expert_distribution_recorder_mode = enable_two_batch_overlap = None
""",
    "eplb/expert_distribution.py": """
class _ExpertDistributionRecorderReal:
    recording = False
    def __init__(self):
        self._expert_location_metadata = self._current_layer_idx = self._disable_all = None
    def start_record(self): ...
    def on_select_experts(self): ...
    def dump_record(self): ...
""",
    "plugins/hook_registry.py": """
class HookType: AFTER, AROUND, BEFORE = "after", "around", "before"
class HookRegistry:
    hooks = {}
    @classmethod
    def register(cls, target, hook, kind):
        cls.hooks[target.removeprefix("sglang.srt.")] = [hook.__name__, kind]
""",
}
"""The names that the plugin needs, at the places where SGLang 0.5.16 to 0.5.23 has them."""

OF_EVERY_PROCESS = {
    "managers.schedule_batch.Req.__init__": ["keep_prefill_only_kv", "after"],
    "disaggregation.utils.get_kv_class": ["index_on_host_without_cuda", "after"],
    "disaggregation.common.conn.CommonKVManager.check_status": ["status_of_room", "around"],
}
if not torch.accelerator.is_available():
    OF_EVERY_PROCESS |= {
        "torch.tensor": ["unpinned", "around"],
        "torch.zeros": ["unpinned", "around"],
        "torch.Tensor.pin_memory": ["as_it_is", "around"],
    }
RECORDER = "eplb.expert_distribution._ExpertDistributionRecorderReal"
OF_EXPERTS = {
    f"{RECORDER}.__init__": ["make_counts", "after"],
    f"{RECORDER}.start_record": ["clear", "after"],
    f"{RECORDER}.on_select_experts": ["count", "around"],
    f"{RECORDER}.dump_record": ["write", "around"],
}
OF_HTTP = {"entrypoints.http_server.launch_server": ["add_routes", "before"]}

NO_VARIABLES: Mapping[str, str] = {}
RECORDING = {RECORD_FILE: "record.npz"}
AGING = {"SHELL_ROUTER_SHORTEST_PREFILL_AGE_S": "5"}

REGISTER = """
import json, multiprocessing, sys
from shell_router import sglang_plugin
from sglang.srt.plugins.hook_registry import HookRegistry

def register():
    sglang_plugin.register()
    print(json.dumps(getattr(HookRegistry, "hooks", {})), flush=True)

if sys.argv[1] == "serves-http":
    register()
else:
    child = multiprocessing.get_context("fork").Process(target=register)
    child.start()
    child.join()
"""


@dataclass(frozen=True)
class Registered:
    """The hooks that were registered by their targets, as [name, type], and what was logged."""

    hooks: dict[str, list[str]]
    log: str


def registered_in(
    folder: Path, *, without: str = "nothing", process: str = "serves-http", variables: Mapping[str, str] = NO_VARIABLES
) -> Registered:
    """The plugin's `register` where `folder` holds a stand-in of SGLang, in which the name `without` is another."""
    for path, text in SGLANG.items():
        file = folder / "sglang" / "srt" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace(without, "renamed"), encoding="utf-8")
    metadata = folder / "sglang-0.5.23.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n", encoding="utf-8")
    found = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join((str(folder), str(Path.cwd())))}
    done = subprocess.run(
        [sys.executable, "-c", REGISTER, process], capture_output=True, text=True, check=True, env=found
    )
    return Registered(json.loads(done.stdout), done.stderr)


def test_the_process_that_serves_http_gets_all_hooks(tmp_path: Path) -> None:
    assert registered_in(tmp_path) == Registered({**OF_EVERY_PROCESS, **OF_HTTP}, "")


def test_another_process_gets_its_hooks_and_needs_no_http_server(tmp_path: Path) -> None:
    registered = registered_in(tmp_path, without="launch_server", process="child")
    assert registered == Registered(OF_EVERY_PROCESS, "")


@pytest.mark.parametrize(
    "name",
    [
        *("schedule_batch.Req", "utils.get_kv_class", "conn.CommonKVManager", "CommonKVManager.check_status"),
        *("KVPoll.Failed", "HookRegistry.register", "hook_registry.HookType"),
        *("http_server.launch_server", "app.add_api_route", "http_server.generate_request"),
        *("GenerateReqInput.bootstrap_host", "GenerateReqInput.bootstrap_port", "GenerateReqInput.bootstrap_room"),
        *("ServerArgs.disaggregation_mode", "ServerArgs.disable_radix_cache", "ServerArgs.tokenizer_worker_num"),
        *("Req.bootstrap_host", "Req.bootstrap_port"),
        *("Req.positional_embed_overrides", "Req.skip_radix_cache_insert"),
    ],
)
def test_a_missing_name_is_said_and_nothing_is_hooked(tmp_path: Path, name: str) -> None:
    registered = registered_in(tmp_path, without=name.split(".")[1])
    assert registered.hooks == {}
    finding, _, _ = registered.log.partition(" in sglang 0.5.23, and stays off")
    assert "The shell_router plugin finds no " in finding
    assert name in finding


def test_the_waiting_queue_is_hooked_where_the_environment_asks_for_it(tmp_path: Path) -> None:
    hooks = registered_in(tmp_path, process="child", variables=AGING).hooks
    assert hooks == {
        **OF_EVERY_PROCESS,
        "managers.schedule_policy.SchedulePolicy.calc_priority": ["reorder", "after"],
    }


def test_where_the_waiting_queue_is_elsewhere_all_else_is_hooked_and_it_says_so(tmp_path: Path) -> None:
    registered = registered_in(tmp_path, without="calc_priority", process="child", variables=AGING)
    assert registered.hooks == OF_EVERY_PROCESS
    assert "has no effect" in registered.log


def test_experts_are_counted_in_every_process_where_a_record_is_asked_for(tmp_path: Path) -> None:
    registered = registered_in(tmp_path, process="child", variables=RECORDING)
    assert registered == Registered({**OF_EVERY_PROCESS, **OF_EXPERTS}, "")


@pytest.mark.parametrize(
    "name",
    [
        *("_ExpertDistributionRecorderReal", "start_record", "on_select_experts", "dump_record"),
        *("expert_distribution_recorder_mode", "enable_two_batch_overlap"),
        *("_expert_location_metadata", "_current_layer_idx", "_disable_all"),
    ],
)
def test_a_missing_name_of_the_recorder_is_said_and_only_experts_are_not_counted(tmp_path: Path, name: str) -> None:
    registered = registered_in(tmp_path, without=name, variables=RECORDING)
    assert registered.hooks == {**OF_EVERY_PROCESS, **OF_HTTP}
    assert "and records no experts" in registered.log
    assert name in registered.log
