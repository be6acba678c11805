"""The three sizes, the specialists, their tokenizer, and the folders they are written to."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.random_checkpoint import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START
from shell_router.topology.prompting import AGGREGATOR
from training.problems import Topic, problems

VOCABULARY = 640
CONTEXT_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Size:
    """One member: its network, how fast it learns, and for how many tokens in each lesson.

    A specialist learns problems of its `topic`, and few others; without `combine_tokens` it never
    reads drafts.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    learning_rate: float
    solve_tokens: int
    combine_tokens: int = 0
    topic: Topic | None = None


SIZES: Mapping[str, Size] = {
    "small": Size(
        64,
        2,
        heads=4,
        kv_heads=2,
        inner=192,
        learning_rate=4e-3,
        solve_tokens=12_000_000,
        combine_tokens=4_000_000,
    ),
    "medium": Size(
        128,
        3,
        heads=4,
        kv_heads=2,
        inner=384,
        learning_rate=3e-3,
        solve_tokens=9_000_000,
        combine_tokens=4_000_000,
    ),
    "large": Size(
        192,
        4,
        heads=6,
        kv_heads=3,
        inner=576,
        learning_rate=2.5e-3,
        solve_tokens=13_000_000,
        combine_tokens=4_000_000,
    ),
}

_TOPIC_TOKENS: Mapping[Topic, int] = {
    "changes": 8_000_000,
    "comparisons": 8_000_000,
    "groups": 9_000_000,
}
SPECIALISTS: Mapping[str, Size] = {
    topic: Size(
        128, 3, heads=4, kv_heads=2, inner=384, learning_rate=3e-3, solve_tokens=tokens, topic=topic
    )
    for topic, tokens in _TOPIC_TOKENS.items()
}
FAMILIES = {"sizes": SIZES, "specialists": SPECIALISTS}


def make_tokenizer() -> Tokenizer:
    """Words of the problems and of the aggregators' prompt, and single digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        show_progress=False,
    )
    texts = [
        f"{one.question}\n{one.solution}"
        for one in islice(problems(random.Random("tokenizer")), 2000)
    ]
    spoken = ["system", "user", "assistant", AGGREGATOR.prefix, AGGREGATOR.slot, AGGREGATOR.suffix]
    tokenizer.train_from_iterator([*texts, *spoken * 50], trainer)
    return tokenizer


def make_network(size: Size, tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """A network with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def save(network: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers, SGLang and the embedded pair load; weights are rounded to
    bfloat16.
    """
    network.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
