"""The order of real SGLang's waiting queue: hooked by its own plugin framework, in a process of its
own.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.sglang_cpu.environment import built_environment, engine_variables, install_plugin
from shell_router.sglang_plugin.patches import FAKE_BOOTSTRAP_HOST, PREFILL_ONLY_PORT
from shell_router.sglang_plugin.waiting_queue import VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

ORDER = """
import json, time
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers import schedule_policy

class NoCache:
    disable = True
    def supports_fast_match_prefix(self): return False
    def supports_prefix_sharing(self): return False

def request(rid, tokens, waited_s, host=None, port=None):
    stats = SimpleNamespace(wait_queue_entry_time=time.perf_counter() - waited_s)
    return SimpleNamespace(rid=rid, origin_input_ids=[1] * tokens, output_ids=[], time_stats=stats, priority=0,
                           num_matched_prefix_tokens=0, bootstrap_host=host, bootstrap_port=port)

policy = schedule_policy.SchedulePolicy("fcfs", NoCache(), False, False, False)
queue = [request("long", 900, 1.0), request("short", 30, 0.5), request("aged", 2000, 60.0)]
queue.insert(0, request("update", 5, 90.0, HOST, PORT))
policy.calc_priority(queue)
print(json.dumps([one.rid for one in queue]), flush=True)
"""


def test_updates_come_last_and_others_by_algorithm_2_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    install_plugin(tmp_path)
    aging = start_ordering(tmp_path, {VARIABLE: "5"})
    not_aging = start_ordering(tmp_path, {})
    assert order_of(aging) == ["aged", "short", "long", "update"]
    assert order_of(not_aging) == ["long", "short", "aged", "update"]


def start_ordering(site: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start an interpreter of SGLang that prints the order of a queue."""
    venv = built_environment()
    assert venv is not None
    return subprocess.Popen(
        [
            str(venv / "bin" / "python"),
            "-c",
            f"HOST, PORT = {FAKE_BOOTSTRAP_HOST!r}, {PREFILL_ONLY_PORT}\n{ORDER}",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # the refresh of prefixes asks for settings that only a whole server has
        env={**engine_variables(site), "SGLANG_ENABLE_WAITING_PREFIX_REFRESH": "0", **variables},
    )


def order_of(process: subprocess.Popen[str]) -> list[str]:
    """The order that the interpreter prints last."""
    printed, complaints = process.communicate(timeout=300)
    assert process.returncode == 0, complaints[-2000:]
    order: list[str] = json.loads(printed.splitlines()[-1])
    return order
