"""The training loop: AdamW with a warm-up and a cosine, batches of equal length, and checkpoints to
resume from.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from training.lessons import Example

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Ids [batch, tokens], flat positions whose next token is learned [learned], and those tokens
[learned].
"""

BATCH_TOKENS = 2048  # three times as many learned far slower per token
WARM_UP = 0.03


@dataclass(frozen=True, slots=True)
class Course:
    """`tokens` to read in all; `learning_rate` at its height."""

    tokens: int
    learning_rate: float


def practise(
    network: Qwen3ForCausalLM,
    more: Callable[[int], Sequence[Example]],
    course: Course,
    checkpoint: Path,
    tell: Callable[[str], None],
) -> None:
    """Train `network` in place on the examples of `more(0)`, `more(1)`, ...; each call is one share
    of the course.

    The state is saved to `checkpoint` after every share, and a course that was cut off goes on from
    there.
    """
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=course.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=0.05,
        fused=True,
    )
    progress = _resumed(checkpoint, network, optimizer)
    network.train()
    while progress.read < course.tokens:
        begun_s = time.monotonic()
        losses = []
        for batch in _batches(more(progress.share), progress.share):
            for group in optimizer.param_groups:
                group["lr"] = course.learning_rate * _schedule(progress.read / course.tokens)
            losses.append(_step(network, optimizer, *batch))
            progress.read += batch[0].numel()
        progress.share += 1
        progress.seconds += time.monotonic() - begun_s
        _save(checkpoint, network, optimizer, progress)
        done = progress.read / course.tokens
        tell(f"{done:4.0%}  loss {sum(losses) / len(losses):.4f}  {progress.seconds:.0f} s")


@dataclass
class _Progress:
    """How far a course has come: tokens read, shares taken, and the time that took."""

    read: int = 0
    share: int = 0
    seconds: float = 0.0


def _resumed(
    checkpoint: Path, network: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer
) -> _Progress:
    if not checkpoint.exists():
        return _Progress()
    state = torch.load(checkpoint)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return _Progress(state["read"], state["share"], state["seconds"])


def _save(
    checkpoint: Path,
    network: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    progress: _Progress,
) -> None:
    state = {
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        **asdict(progress),
    }
    part = checkpoint.with_suffix(".part")
    torch.save(state, part)
    part.replace(checkpoint)


def _step(
    network: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    at: torch.Tensor,
    targets: torch.Tensor,
) -> float:
    """One step on ids [batch, tokens]; what follows the flat positions `at` [learned] shall be
    `targets` [learned].
    """
    with torch.autocast("cpu", torch.bfloat16):
        states = network.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = network.lm_head(states.flatten(0, 1)[at])
    loss = cross_entropy(logits.float(), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _schedule(progress: float) -> float:
    if progress < WARM_UP:
        return progress / WARM_UP + 1e-3
    return 0.02 + 0.98 * 0.5 * (
        1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP)))
    )


def _batches(examples: Sequence[Example], seed: int) -> list[Batch]:
    """Examples of like length together, in an order that `seed` fixes."""
    ordered = sorted(examples, key=lambda example: len(example.prompt) + len(example.target))
    batches: list[Batch] = []
    batch: list[Example] = []
    for example in ordered:
        length = len(example.prompt) + len(example.target)
        if batch and length * (len(batch) + 1) > BATCH_TOKENS:
            batches.append(_tensors(batch))
            batch = []
        batch.append(example)
    batches.append(_tensors(batch))
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist()
    return [batches[index] for index in order]


def _tensors(batch: Sequence[Example]) -> Batch:
    width = max(len(example.prompt) + len(example.target) for example in batch) - 1
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    at: list[int] = []
    targets: list[int] = []
    for row, example in enumerate(batch):
        whole = [*example.prompt, *example.target]
        ids[row, : len(whole) - 1] = torch.tensor(whole[:-1])
        first = row * width + len(example.prompt) - 1
        at.extend(range(first, first + len(example.target)))
        targets.extend(example.target)
    return ids, torch.tensor(at), torch.tensor(targets)
