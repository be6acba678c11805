"""What the plugin does where SGLang lacks a name that it needs: a stand-in of SGLang, in a process
for each case.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shell_router.sglang_plugin.experts import PLACEMENT, RECORD_FILE

SGLANG = {
    "managers/schedule_batch.py": """
class Req:
    def __init__(self, bootstrap_host, bootstrap_port):
        self.bootstrap_host, self.bootstrap_port = bootstrap_host, bootstrap_port
        self.positional_embed_overrides = None
        self.skip_radix_cache_insert = True
        self.origin_input_ids_unpadded = self.output_ids = self.sampling_params = self.spec_verify_ct = None
        self.custom_logit_processor = self.grammar = self.return_hidden_states = self.return_logprob = None
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
    disaggregation_mode = disable_radix_cache = tokenizer_worker_num = speculative_algorithm = None
    expert_distribution_recorder_mode = enable_two_batch_overlap = None
    enable_eplb = ep_num_redundant_experts = elastic_ep_backend = None
""",
    "eplb/expert_distribution.py": """
class _ExpertDistributionRecorderReal:
    recording = False
    def __init__(self):
        self._expert_location_metadata = self._current_layer_idx = self._disable_all = None
    def start_record(self): ...
    def on_select_experts(self): ...
    def dump_record(self): ...
def get_global_expert_distribution_recorder(): ...
""",
    "eplb/expert_location.py": """
class ExpertLocationMetadata:
    def init_by_mapping(): ...
def get_global_expert_location_metadata(): ...
""",
    "runtime_context.py": "def get_exec(): ...",
    "eplb/eplb_manager.py": """
class EPLBManager:
    def _compute_expert_location_metadata(self): ...
""",
    "sampling/sampling_batch_info.py": """
class SamplingBatchInfo:
    def apply_logits_bias(self, logits): ...
""",
    "speculative/ngram_info.py": "class NgramVerifyInput: ...",
    "speculative/spec_info.py": """
class SpeculativeAlgorithm:
    def build_disagg_draft_input(self): ...
""",
    "speculative/ngram_worker.py": """
class NGRAMWorker:
    target_worker = None
    def __init__(self):
        self.draft_token_num = self.enable_overlap = self.model_runner = self.speculative_num_draft_tokens = None
    def _init_preallocated_tensors(self): ...
    def _prepare_draft_tokens(self): ...
    def _update_ngram_corpus(self): ...
    def forward_batch_generation(self): ...
def eagle_sample(): ...
def move_accept_tokens_to_target_kvcache(): ...
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
    "disaggregation.common.conn.CommonKVManager.check_status": ["check_room_status", "around"],
}
OF_WAITING = {"managers.schedule_policy.SchedulePolicy.calc_priority": ["reorder", "after"]}
if not torch.accelerator.is_available():
    OF_EVERY_PROCESS |= {
        "torch.tensor": ["make_unpinned", "around"],
        "torch.zeros": ["make_unpinned", "around"],
        "torch.Tensor.pin_memory": ["keep_unpinned", "around"],
    }
NEEDED = OF_EVERY_PROCESS
OF_EVERY_PROCESS = {**NEEDED, **OF_WAITING}
RECORDER = "eplb.expert_distribution._ExpertDistributionRecorderReal"
OF_EXPERTS = {
    f"{RECORDER}.__init__": ["make_counts", "after"],
    f"{RECORDER}.start_record": ["clear", "after"],
    f"{RECORDER}.on_select_experts": ["count", "around"],
    f"{RECORDER}.dump_record": ["write", "around"],
}
OF_PLACEMENT = {
    "eplb.eplb_manager.EPLBManager._compute_expert_location_metadata": ["compute", "around"]
}
WORKER = "speculative.ngram_worker.NGRAMWorker"
OF_DRAFTS = {
    f"{WORKER}.__init__": ["refuse_overlap", "after"],
    f"{WORKER}.forward_batch_generation": ["run", "around"],
    f"{WORKER}._prepare_draft_tokens": ["make_chains", "around"],
    f"{WORKER}._update_ngram_corpus": ["learn_nothing", "around"],
    "speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input": [
        "make_first_input",
        "around",
    ],
    "speculative.ngram_worker.move_accept_tokens_to_target_kvcache": ["stay_in_place", "around"],
    "speculative.ngram_worker.eagle_sample": ["sample_and_compare", "around"],
}
OF_HTTP = {"entrypoints.http_server.launch_server": ["add_routes", "before"]}

NO_VARIABLES: Mapping[str, str] = {}
RECORDING = {RECORD_FILE: "record.npz"}
PLACING = {PLACEMENT: "swap"}
DRAFTING = {"SHELL_ROUTER_DRAFTS": "1"}
AGING = {"SHELL_ROUTER_SHORTEST_PREFILL_AGE_S": "5"}

CANNOT_DRAFT = (
    "SHELL_ROUTER_DRAFTS is set, and this SGLang cannot draft: the reason is in the log.\n"
)

FORKS = """
import json, multiprocessing, os, sys, traceback
from pathlib import Path
import torch  # once for all cases; each is a fork, since SGLang's processes register the plugin once

def register(folder):
    from shell_router import sglang_plugin
    from sglang.srt.plugins.hook_registry import HookRegistry

    try:
        sglang_plugin.register()
    except SystemExit as ended:  # what ends a server
        print(ended, file=sys.stderr)
    Path(folder, "hooks.json").write_text(json.dumps(getattr(HookRegistry, "hooks", {})))

def run(folder, process, variables):
    os.dup2(os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    sys.path.insert(0, folder)
    os.environ.update(variables)
    if process == "serves-http":
        register(folder)
    else:
        child = multiprocessing.get_context("fork").Process(target=register, args=(folder,))
        child.start()
        child.join()

for line in sys.stdin:
    if not (pid := os.fork()):
        try:
            run(*json.loads(line))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    print("registered", flush=True)
"""


@dataclass(frozen=True)
class Registered:
    """The hooks that were registered by their targets, as [name, type], and what was logged."""

    hooks: dict[str, list[str]]
    log: str


Register = Callable[..., Registered]


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch and runs each case that it reads in a fork of its own."""
    command = [sys.executable, "-c", FORKS]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def registered_in(forks: subprocess.Popen[str], tmp_path: Path) -> Register:
    """The plugin's `register` with a stand-in of SGLang, in which the name `without` is another."""
    assert forks.stdin is not None and forks.stdout is not None
    writing, reading = forks.stdin, forks.stdout

    def registered(
        *,
        without: str = "nothing",
        process: str = "serves-http",
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> Registered:
        _install(tmp_path, without)
        writing.write(json.dumps([str(tmp_path), process, {**variables}]) + "\n")
        writing.flush()
        assert reading.readline() == "registered\n"
        log = (tmp_path / "log").read_text(encoding="utf-8")
        hooks = tmp_path / "hooks.json"
        assert hooks.exists(), log
        return Registered(json.loads(hooks.read_bytes()), log)

    return registered


def _install(folder: Path, without: str) -> None:
    for path, text in SGLANG.items():
        file = folder / "sglang" / "srt" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace(without, "renamed"), encoding="utf-8")
    metadata = folder / "sglang-0.5.23.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n", encoding="utf-8"
    )


def test_the_process_that_serves_http_gets_all_hooks(registered_in: Register) -> None:
    assert registered_in() == Registered({**OF_EVERY_PROCESS, **OF_HTTP}, "")


def test_another_process_gets_its_hooks_and_needs_no_http_server(registered_in: Register) -> None:
    registered = registered_in(without="launch_server", process="child")
    assert registered == Registered(OF_EVERY_PROCESS, "")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "schedule_batch.Req",
            "utils.get_kv_class",
            "conn.CommonKVManager",
            "CommonKVManager.check_status",
        ),
        *("KVPoll.Failed", "HookRegistry.register", "hook_registry.HookType"),
        *("http_server.launch_server", "app.add_api_route", "http_server.generate_request"),
        *(
            "GenerateReqInput.bootstrap_host",
            "GenerateReqInput.bootstrap_port",
            "GenerateReqInput.bootstrap_room",
        ),
        *(
            "ServerArgs.disaggregation_mode",
            "ServerArgs.disable_radix_cache",
            "ServerArgs.tokenizer_worker_num",
        ),
        "ServerArgs.speculative_algorithm",
        *("Req.bootstrap_host", "Req.bootstrap_port"),
        *("Req.positional_embed_overrides", "Req.skip_radix_cache_insert"),
    ],
)
def test_a_missing_name_is_said_and_nothing_is_hooked(registered_in: Register, name: str) -> None:
    registered = registered_in(without=name.split(".")[1])
    assert registered.hooks == {}
    finding, _, _ = registered.log.partition(" in sglang 0.5.23, and stays off")
    assert "The shell_router plugin finds no " in finding
    assert name in finding


def test_where_the_waiting_queue_is_elsewhere_all_else_is_hooked_and_it_says_so(
    registered_in: Register,
) -> None:
    registered = registered_in(without="calc_priority", process="child", variables=AGING)
    assert registered.hooks == NEEDED
    assert "updates do not yield to prompts" in registered.log


def test_experts_are_counted_in_every_process_where_a_record_is_asked_for(
    registered_in: Register,
) -> None:
    registered = registered_in(process="child", variables=RECORDING)
    assert registered == Registered({**OF_EVERY_PROCESS, **OF_EXPERTS}, "")


@pytest.mark.parametrize(
    "name",
    [
        *("_ExpertDistributionRecorderReal", "start_record", "on_select_experts", "dump_record"),
        *("expert_distribution_recorder_mode", "enable_two_batch_overlap"),
        *("_expert_location_metadata", "_current_layer_idx", "_disable_all"),
    ],
)
def test_a_missing_name_of_the_recorder_is_said_and_only_experts_are_not_counted(
    registered_in: Register, name: str
) -> None:
    registered = registered_in(without=name, variables=RECORDING)
    assert registered.hooks == {**OF_EVERY_PROCESS, **OF_HTTP}
    assert "and records and places no experts" in registered.log
    assert name in registered.log


def test_experts_are_placed_and_counted_where_a_placement_is_asked_for(
    registered_in: Register,
) -> None:
    registered = registered_in(process="child", variables=PLACING)
    assert registered == Registered({**OF_EVERY_PROCESS, **OF_EXPERTS, **OF_PLACEMENT}, "")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "EPLBManager",
            "_compute_expert_location_metadata",
            "get_global_expert_distribution_recorder",
        ),
        *("get_global_expert_location_metadata", "init_by_mapping", "get_exec"),
        *("enable_eplb", "ep_num_redundant_experts", "elastic_ep_backend"),
    ],
)
def test_a_missing_name_of_the_balancer_is_said_and_no_experts_are_placed(
    registered_in: Register, name: str
) -> None:
    registered = registered_in(without=name, process="child", variables=PLACING)
    assert registered.hooks == OF_EVERY_PROCESS
    assert "and records and places no experts" in registered.log
    assert name in registered.log


def test_a_record_needs_no_balancer(registered_in: Register) -> None:
    registered = registered_in(without="EPLBManager", process="child", variables=RECORDING)
    assert registered == Registered({**OF_EVERY_PROCESS, **OF_EXPERTS}, "")


def test_a_placement_of_no_known_algorithm_is_said_and_places_nothing(
    registered_in: Register,
) -> None:
    registered = registered_in(process="child", variables={PLACEMENT: "best"})
    assert registered.hooks == OF_EVERY_PROCESS
    assert (
        "SHELL_ROUTER_EXPERT_PLACEMENT is 'best'" in registered.log
        and "swap, gimbal" in registered.log
    )


def test_drafts_are_hooked_where_requests_are_decoded_and_that_is_asked_for(
    registered_in: Register,
) -> None:
    registered = registered_in(process="child", variables=DRAFTING)
    assert registered == Registered({**OF_EVERY_PROCESS, **OF_DRAFTS}, "")


def test_the_process_that_serves_http_drafts_nothing(registered_in: Register) -> None:
    assert registered_in(variables=DRAFTING) == Registered({**OF_EVERY_PROCESS, **OF_HTTP}, "")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NGRAMWorker",
            "forward_batch_generation",
            "_init_preallocated_tensors",
            "_prepare_draft_tokens",
        ),
        *(
            "_update_ngram_corpus",
            "target_worker",
            "eagle_sample",
            "move_accept_tokens_to_target_kvcache",
        ),
        *("build_disagg_draft_input", "NgramVerifyInput", "apply_logits_bias"),
        *(
            "output_ids",
            "spec_verify_ct",
            "grammar",
        ),
        *("draft_token_num", "enable_overlap", "model_runner", "speculative_num_draft_tokens"),
    ],
)
def test_a_missing_name_of_speculation_is_said_and_ends_the_server(
    registered_in: Register, name: str
) -> None:
    registered = registered_in(without=name, process="child", variables=DRAFTING)
    assert registered.hooks == OF_EVERY_PROCESS
    assert "and drafts nothing" in registered.log
    assert name in registered.log
    assert registered.log.endswith(CANNOT_DRAFT)


@pytest.mark.parametrize("variables", [DRAFTING, NO_VARIABLES], ids=["to draft", "plain"])
def test_a_server_that_is_to_draft_ends_where_the_plugin_stays_off(
    registered_in: Register, variables: Mapping[str, str]
) -> None:
    off = registered_in(without="get_kv_class", process="child", variables=variables)
    assert off.hooks == {}
    assert off.log.endswith(CANNOT_DRAFT) == (variables is DRAFTING)
