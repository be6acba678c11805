"""The overlap benchmark measures a pair of real SGLang that runs already."""

from pathlib import Path

import pytest

from tests.fakes.pairs_under_test import PairUnderTest
from tests.integration.test_benchmarks import build_rows, printed_by

pytestmark = pytest.mark.sglang

DEPLOYMENT = """
models:
  small: &model
    path: {model}
    pairs: [{{prefill: "{prefill}", decode: "{decode}", bootstrap_host: "{host}", bootstrap_port: {port}}}]
  medium: *model
  large: *model
"""
SHORT = ("--rounds", "1", "--new-tokens", "64", "--question-tokens", "20", "--chunks", "8")
FIXED = "in chunks of 8"
ROUNDING = 1e-9


async def test_all_settings_are_measured_on_a_running_pair(
    real_sglang: PairUnderTest, tmp_path: Path
) -> None:
    address = real_sglang.address
    deployment = tmp_path / "running.yaml"
    deployment.write_text(
        DEPLOYMENT.format(
            model=real_sglang.needs_model(),
            prefill=address.prefill_url,
            decode=address.decode_url,
            host=address.bootstrap_host,
            port=address.bootstrap_port,
        )
    )
    printed = await printed_by("overlap", "--engine", "sglang", "--config", str(deployment), *SHORT)
    rows = {row["setting"]: row for row in build_rows(printed)}
    ahead = ("tree + incremental prefill", "full", FIXED)
    assert rows.keys() == {"all-to-all", "tree", *ahead}
    assert b"SGLang 0.5." in printed
    assert all(row["cut_off"] == 0 for name, row in rows.items() if name != "full")
    assert rows["tree"]["exposed_share"] == rows["tree"]["vs_tree"] == 1
    # without updates the cache holds at a prompt's end what its request finds there, by the
    # engine's own count
    for name in ("all-to-all", "tree"):
        assert rows[name]["late_share"] == pytest.approx(1 - rows[name]["cached_share"])
    assert all(
        rows[name]["late_share"] >= 1 - rows[name]["cached_share"] - ROUNDING for name in ahead
    )
    # where updates reach the cache, requests find the outputs of precursors there, and otherwise
    # the question alone
    assert rows[FIXED]["cached_share"] > rows["tree"]["cached_share"] + 0.1
