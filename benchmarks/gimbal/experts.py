"""What expert parallelism adds to a step of Gimbal's two GPUs: the fullest one's experts, and the
exchange of tokens.

Attention is data-parallel: each engine has its own requests and all that is not in experts, and
half of the experts of each layer. All GPUs wait for each other in every layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np

from benchmarks.expert_placement.drawn import Routing, drawn
from benchmarks.gimbal.serving import (
    ACTIVE,
    BANDWIDTH,
    BYTES,
    CHOSEN,
    COMPUTE_SHARE,
    ENGINES,
    EXPERTS,
    FLOPS,
    IN_EXPERTS,
    KV_BYTES,
    LAYERS,
    MEMORY,
    MEMORY_SHARE,
    PARAMETERS,
    PASS_S,
    USABLE,
    costs,
)
from shell_router.experts.placement import (
    ExpertPlacement,
    ExpertRecord,
    Measures,
    measure_placement,
    place,
)
from shell_router.standins.simulated.costs import PairCosts

HIDDEN = 2048
"""Numbers of a token between layers: `hidden_size` in the config.json of Qwen3-30B-A3B."""
LINK = 300e9
"""Bytes a second that an A100 sends to the other: half of its data sheet's 600 GB/s of NVLink,
which is both ways.
"""
EXPERT = IN_EXPERTS / (LAYERS * EXPERTS)
"""Parameters of one expert."""
TOKENS = 2000
"""Of a drawn record."""

Slowed = Literal["roofline", "by load"]
"""What an uneven load costs. By roofline a GPU reads each expert that any token takes once,
whatever the number of its
tokens: only products grow with the load. `by load`: reading does too, the most that placement could
save."""


@dataclass(frozen=True, eq=False)
class ExpertParallel:
    """Experts on `placement` whose tokens are routed as in `record`, a record of TOKENS tokens.

    Assumed in favor of placement: a copy of a token crosses the link for each of its next experts
    that is on another GPU, there and back, as the paper's cut (11) has it; no exchange takes time
    before its first byte, but for the `synchronization_s` that each layer takes on top of its
    slowest GPU; a step's loads are those of the record, without the scatter of its few tokens;
    moving experts is free.
    """

    record: ExpertRecord
    placement: ExpertPlacement
    slowed: Slowed = "roofline"
    synchronization_s: float = 0.0

    @property
    def costs(self) -> PairCosts:
        """Of an engine, without its experts."""
        bandwidth, flops, outside = (
            BANDWIDTH * MEMORY_SHARE,
            FLOPS * COMPUTE_SHARE,
            PARAMETERS - IN_EXPERTS,
        )
        pass_s = PASS_S + outside * BYTES / bandwidth
        token_s = 2 * (ACTIVE - CHOSEN * LAYERS * EXPERT) / flops
        capacity = int(
            (MEMORY * USABLE - (outside + IN_EXPERTS / self.placement.gpus) * BYTES) / KV_BYTES
        )
        one = costs(cached=False)
        prefill = replace(one.prefill, forward_s=pass_s, token_s=token_s)
        return PairCosts(
            prefill,
            replace(one.decode, step_s=pass_s, sequence_s=token_s, cache_tokens=capacity),
            one.transfer,
        )

    @cached_property
    def measures(self) -> Measures:
        """Of the placement on the record."""
        return measure_placement(self.record, self.placement)

    @cached_property
    def step_s(self) -> Callable[[int], float]:
        """Seconds of experts and exchange in a step, by its tokens on all GPUs together."""
        taken = self.record.activations / (
            self.record.activations.sum(axis=1, keepdims=True) / CHOSEN
        )
        on, gpus = self.placement.on, self.placement.gpus
        load = (taken[:, None] @ on)[:, 0]  # [layers, gpus], of one token
        copies = 2 * CHOSEN * LAYERS * self.measures.traffic
        exchange_s = copies * HIDDEN * BYTES / (gpus * LINK)
        compute_s = load * 2 * EXPERT / (FLOPS * COMPUTE_SHARE)

        @cache
        def seconds(tokens: int) -> float:
            read = ((1 - (1 - taken.clip(max=1)) ** tokens)[:, None] @ on)[:, 0]
            busy_s = read * EXPERT * BYTES / (BANDWIDTH * MEMORY_SHARE) + tokens * compute_s
            if self.slowed == "by load":
                busy_s = (
                    busy_s.mean(axis=1, keepdims=True) * load / load.mean(axis=1, keepdims=True)
                )
            waited_s = LAYERS * self.synchronization_s
            return float(busy_s.max(axis=1).sum() + tokens * exchange_s + waited_s)

        return seconds


@cache
def placements(gpus: int = ENGINES) -> tuple[ExpertRecord, Mapping[str, ExpertPlacement]]:
    """A record to measure on, and placements by name, made from another record of the same model.

    The model is drawn, with few strong pairs, as in the paper's figures 3 and 4. `stacked` is the
    worst there is: the more popular half of each layer's experts on one GPU.
    """
    seen, fresh = (
        drawn(Routing(LAYERS, EXPERTS, CHOSEN), TOKENS, sample=sample) for sample in range(2)
    )
    found = {name: place(name, seen, gpus) for name in ("contiguous", "gimbal", "swap")}
    rank = np.argsort(np.argsort(-seen.activations, axis=1, kind="stable"), axis=1)
    return fresh, {**found, "stacked": ExpertPlacement(gpus, rank * gpus // EXPERTS)}
