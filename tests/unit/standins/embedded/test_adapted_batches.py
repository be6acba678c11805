"""Adapters in a batch against the same network with their weights merged by hand: W + alpha / r * B A."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.adapters.made import make_adapter
from benchmarks.random_checkpoint import make_checkpoint
from shell_router.errors import ConfigError
from shell_router.standins.embedded.adapters import AdaptedLinears, Adapter, AdapterReader, rows_by_adapter
from shell_router.standins.embedded.model import CausalLm, PromptKv, SlotKv, load_causal_lm
from shell_router.standins.embedded.settings import Dtype, EmbeddedSettings, LoraSettings
from tests.fakes.tiny_models import merge, one_thread, plain

ADAPTERS: Mapping[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "queries": {"seed": 2, "rank": 1, "modules": ("q_proj", "v_proj"), "strength": 1.0},
    "wide": {"seed": 3, "rank": 16, "alpha": 4.0, "rank_stabilised": True},
}
NAMES = st.sampled_from([None, *ADAPTERS])
TOKENS = st.lists(st.integers(3, 700), min_size=2, max_size=12)
SCALE = 3.0
"""About the standard deviation of a logit."""


@dataclass(frozen=True)
class Served:
    """One model: as the engine runs it, with adapters in memory, and merged with each, run by transformers alone."""

    lm: CausalLm
    adapters: Mapping[str | None, Adapter | None]
    merged: Mapping[str | None, Any]

    def expected(self, name: str | None, tokens: list[int]) -> Tensor:
        """The last token's logits, of the merged weights."""
        return self.merged[name](torch.tensor([tokens])).logits[0, -1].double()  # type: ignore[no-any-return]

    def prefilled(self, name: str | None, tokens: list[int], chunk: int = 100) -> tuple[PromptKv, Tensor]:
        """The prompt's KV, computed chunk by chunk, and the last token's logits."""
        prompt = PromptKv(self.lm.kv_shape.empty(len(tokens)))
        for start in range(0, len(tokens), chunk):
            part = torch.tensor(tokens[start : start + chunk])
            logits = self.lm.prefill(prompt, part, start, adapter=self.adapters[name])
        return prompt, logits[-1].double()

    def decoded(self, rows: list[tuple[str | None, list[int]]]) -> Tensor:
        """One step of a batch: each row's last token after the KV of those before it."""
        slots = SlotKv(self.lm.kv_shape, rows=1, tokens=4)
        slots.ensure(len(rows), max(len(tokens) for _, tokens in rows))
        for row, (name, tokens) in enumerate(rows):
            slots.fill(row, self.prefilled(name, tokens[:-1])[0].kv)
        adapted = rows_by_adapter([self.adapters[name] for name, _ in rows], self.lm.kv_shape.device)
        last = torch.tensor([tokens[-1:] for _, tokens in rows])
        places = torch.tensor([len(tokens) - 1 for _, tokens in rows])
        return self.lm.decode(slots, last, places, adapted)[:, 0].double()


def serve(root: Path, dtype: Dtype, architecture: Any = "qwen3") -> Served:
    model = make_checkpoint(root / "model", architecture=architecture, seed=4)
    folders = {name: make_adapter(root / name, model, **arguments) for name, arguments in ADAPTERS.items()}
    lm = load_causal_lm(EmbeddedSettings(str(model), dtype=dtype, lora=LoraSettings()))
    assert lm.adapted is not None
    read = AdapterReader(shapes=lm.adapted.shapes, max_rank=16, dtype=lm.kv_shape.dtype, device=lm.kv_shape.device)
    adapters = {name: read(name, str(folder)) for name, folder in folders.items()}
    merged = {name: merge(model, folder) for name, folder in folders.items()}
    return Served(lm, {None: None, **adapters}, {None: plain(model), **merged})


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("model"), "float64", request.param)


@pytest.fixture(autouse=True)
def as_in_a_server() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


TORCH = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@TORCH
@given(name=NAMES, tokens=TOKENS, chunk=st.integers(1, 12))
def test_a_prompt_with_an_adapter_is_that_of_merged_weights(
    exact: Served, name: str | None, tokens: list[int], chunk: int
) -> None:
    assert torch.allclose(exact.prefilled(name, tokens, chunk)[1], exact.expected(name, tokens), atol=1e-9)


@TORCH
@given(rows=st.lists(st.tuples(NAMES, TOKENS), min_size=1, max_size=8))
def test_each_row_of_a_mixed_batch_is_that_of_its_own_merged_weights(
    exact: Served, rows: list[tuple[str | None, list[int]]]
) -> None:
    expected = torch.stack([exact.expected(*row) for row in rows])
    assert torch.allclose(exact.decoded(rows), expected, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_with_coarser_numbers_a_mixed_batch_is_as_near_to_merged_weights_as_the_model_alone(
    tmp_path: Path, dtype: Dtype, tolerance: float
) -> None:
    served = serve(tmp_path, dtype)
    rows = [(name, [5 + 7 * row, 40, 300 + row, 9]) for row, name in enumerate([None, *ADAPTERS, None, "all"])]
    expected = torch.stack([served.expected(*row) for row in rows])
    errors = (served.decoded(rows) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < tolerance, errors


def test_rows_without_an_adapter_are_bit_for_bit_what_they_are_without_adapted_rows(exact: Served) -> None:
    rows: list[tuple[str | None, list[int]]] = [(None, [5, 6, 7]), (None, [8, 9, 10, 11])]
    without_adapted, with_adapted = exact.decoded([*rows, (None, [3, 4])]), exact.decoded([*rows, ("all", [3, 4])])
    assert torch.equal(with_adapted[:2], without_adapted[:2])
    assert not torch.allclose(with_adapted[2], without_adapted[2])


def test_adapters_change_what_is_said_each_in_its_own_way(exact: Served) -> None:
    tokens = [5, 17, 300, 42, 77]
    logits = [exact.prefilled(name, tokens)[1] for name in (None, *ADAPTERS)]
    for at, one in enumerate(logits):
        assert all((one - other).std() > SCALE / 10 for other in logits[at + 1 :])


def test_nothing_of_an_adapter_is_kept_after_its_forward_pass(exact: Served) -> None:
    tokens = [5, 6, 7]
    exact.prefilled("all", tokens)
    plainly = exact.lm.network(torch.tensor([tokens])).logits[0, -1]
    assert torch.allclose(plainly, exact.expected(None, tokens), atol=1e-9)


def test_rows_are_grouped_by_adapter(exact: Served) -> None:
    one, two = exact.adapters["all"], exact.adapters["wide"]
    device = torch.device("cpu")
    assert rows_by_adapter([None, None], device) == ()
    (whole,) = rows_by_adapter([one, one], device)
    assert (whole.adapter, whole.rows) == (one, None)
    groups = rows_by_adapter([one, None, two, one], device)
    assert [(each.adapter, each.rows.tolist()) for each in groups if each.rows is not None] == [
        (one, [0, 3]),
        (two, [2]),
    ]


def test_a_network_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layers"):
        AdaptedLinears(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_without_lora_the_network_has_no_hooks(tmp_path: Path) -> None:
    lm = load_causal_lm(EmbeddedSettings(str(make_checkpoint(tmp_path))))
    assert lm.adapted is None
    assert not any(module._forward_hooks for module in lm.network.modules())
