"""The overlap benchmark measures a pair of real SGLang that runs already."""

from pathlib import Path

import pytest

from tests.fakes.pairs_under_test import PairUnderTest
from tests.integration.test_benchmarks import printed_by, rows_of

pytestmark = pytest.mark.sglang

DEPLOYMENT = """
models:
  small: &model
    path: {model}
    pairs: [{{prefill: "{prefill}", decode: "{decode}", bootstrap_host: "{host}", bootstrap_port: {port}}}]
  medium: *model
  large: *model
"""
SHORT = ("--rounds", "1", "--new-tokens", "16", "--question-tokens", "40")


async def test_all_settings_are_measured_on_a_running_pair(real_sglang: PairUnderTest, tmp_path: Path) -> None:
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
    rows = {row["setting"]: row for row in rows_of(printed)}
    assert rows.keys() == {"all-to-all", "tree", "tree + incremental prefill", "full"}
    assert b"SGLang 0.5." in printed
    assert rows["tree"]["exposed_share"] == 1.0
    assert rows["tree + incremental prefill"]["late_share"] < rows["tree"]["late_share"]
