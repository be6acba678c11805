"""Settings, the command line, and what the router must not import."""

import subprocess
import sys
from typing import Any

import pytest

from shell_router.errors import ConfigError
from shell_router.standins.embedded.__main__ import parse_arguments
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "int8"}, {"threads": 0}, {"max_total_tokens": -1}, {"context_length": 0}, {"kv_wait_s": 0}],
)
def test_bad_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EmbeddedSettings("model", **wrong)


def test_the_command_line_takes_the_names_of_sglang() -> None:
    line = (
        "--model-path m --disaggregation-mode prefill --disaggregation-bootstrap-port 9001 --host 0.0.0.0 --port 30001 "
        "--max-total-tokens 500 --incremental-streaming-output --dtype float64 --chunked-prefill-size 64"
    )
    assert parse_arguments(line.split()) == ServerSettings(
        EmbeddedSettings(
            "m",
            dtype="float64",
            max_total_tokens=500,
            chunked_prefill_size=64,
            incremental_streaming_output=True,
            host="0.0.0.0",
        ),
        mode="prefill",
        port=30001,
        bootstrap_port=9001,
    )


def test_launching_loads_no_torch() -> None:
    code = (
        "import sys, shell_router.standins.embedded.fleet;sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
