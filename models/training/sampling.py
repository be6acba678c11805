"""Batched decoding without an engine: what the models write, and how sure they are of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

MAX_NEW_TOKENS = 96
BATCH = 384


@dataclass(frozen=True, slots=True)
class Written:
    """Ids without the end of turn, and the log-probabilities of all tokens with the end."""

    ids: list[int]
    logprobs: list[float]

    @property
    def confidence(self) -> float:
        """The geometric mean of the tokens' probabilities."""
        return math.exp(fmean(self.logprobs))


@torch.inference_mode()
def write(
    network: Qwen3ForCausalLM,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[Written]:
    """One output per prompt, in order; at temperature 0 the likeliest tokens."""
    network.eval()
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    written: list[Written | None] = [None] * len(prompts)
    draw = torch.Generator().manual_seed(seed)
    for begin in range(0, len(order), BATCH):
        batch = order[begin : begin + BATCH]
        outputs = _write_batch(
            network, [prompts[index] for index in batch], temperature, top_p, draw
        )
        for index, output in zip(batch, outputs, strict=True):
            written[index] = output
    return [one for one in written if one is not None]


def _write_batch(
    network: Qwen3ForCausalLM,
    prompts: Sequence[list[int]],
    temperature: float,
    top_p: float,
    draw: torch.Generator,
) -> list[Written]:
    end, pad = network.config.eos_token_id, network.config.pad_token_id
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros(len(prompts), width + MAX_NEW_TOKENS, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    positions = (torch.arange(width) - (width - lengths)[:, None]).clamp(min=0)
    cache = DynamicCache(config=network.config)
    running = torch.ones(len(prompts), dtype=torch.bool)
    said: list[torch.Tensor] = []
    chances: list[torch.Tensor] = []
    for step in range(MAX_NEW_TOKENS):
        out = network(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask[:, : width + step],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        log_probabilities = out.logits[:, -1].float().log_softmax(-1)
        ids = _pick(log_probabilities, temperature, top_p, draw)
        chances.append(log_probabilities.gather(1, ids)[:, 0])
        said.append(torch.where(running, ids[:, 0], end))
        running &= ids[:, 0] != end
        if not running.any():
            break
        positions = (lengths + step)[:, None]
    rows = torch.stack(said, 1).tolist()
    written = []
    for row, logprobs in zip(rows, torch.stack(chances, 1).tolist(), strict=True):
        length = row.index(end) if end in row else len(row)
        written.append(Written(row[:length], logprobs[: length + 1]))
    return written


def _pick(
    log_probabilities: torch.Tensor, temperature: float, top_p: float, draw: torch.Generator
) -> torch.Tensor:
    if temperature == 0:
        return log_probabilities.argmax(-1, keepdim=True)
    probabilities = (log_probabilities / temperature).softmax(-1)
    ordered, tokens = probabilities.sort(-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    return tokens.gather(1, torch.multinomial(ordered, 1, generator=draw))
