"""A tiny random-weight checkpoint with its own tokenizer: real files, made in a second, that read as words.

Written with NumPy and safetensors alone, so that making one needs no torch.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shell_router.engines.embedded.corpus import english_like
from shell_router.errors import ConfigError

Architecture = Literal["qwen3", "llama"]
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The layout of Qwen's ChatML template, without tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network: `heads` query heads share `kv_heads` key-value heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    context_length: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def make_checkpoint(
    folder: str | Path,
    *,
    architecture: Architecture = "qwen3",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab_size: int = 1024,
    context_length: int = 8192,
    seed: int = 0,
    tokenizer_variant: int = 0,
) -> Path:
    """Write config, weights, tokenizer and chat template into `folder` and return it.

    Equal arguments give equal files. Checkpoints of one `tokenizer_variant` and `vocab_size` share their tokenizer
    whatever their `seed`; another variant has another vocabulary. Raises `ConfigError` on sizes that do not fit.
    """
    shape = Shape(hidden, layers, heads, kv_heads, context_length)
    _check(architecture, shape)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(vocab_size, tokenizer_variant)
    config = _config(architecture, shape, tokenizer)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(context_length))
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", {"eos_token_id": config["eos_token_id"], "do_sample": False})
    save_file(_weights(config, tokenizer, seed), target / "model.safetensors", metadata={"format": "pt"})
    return target


def _check(architecture: str, shape: Shape) -> None:
    if architecture not in ("qwen3", "llama"):
        raise ConfigError(f"architecture {architecture!r} is unknown.", remedy="Choose qwen3 or llama.")
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise ConfigError(
            f"hidden {shape.hidden}, heads {shape.heads} and kv_heads {shape.kv_heads} do not fit.",
            remedy="heads must divide hidden into even parts, and kv_heads must divide heads.",
        )


def _train_tokenizer(vocab_size: int, variant: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_training_text(variant)], trainer)
    return tokenizer


def _training_text(variant: int) -> str:
    """Variant 0 knows every word; the others lack some, so that they cut the same text differently."""
    return english_like(random.Random(f"corpus/{variant}"), sentences=1500, first_word=6 * variant)


def _tokenizer_config(context_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(architecture: Architecture, shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[architecture]],
        "model_type": architecture,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": shape.context_length,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "bos_token_id": None,
    }


def _weights(config: dict[str, Any], tokenizer: Tokenizer, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights: Weights = {"model.embed_tokens.weight": _normal(rng, vocab, hidden, 1.0)}
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in _layer_weights(config, rng).items():
            weights[f"model.layers.{layer}.{name}"] = tensor
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    weights["lm_head.weight"] = _word_head(rng, tokenizer, hidden)
    return weights


def _layer_weights(config: dict[str, Any], rng: np.random.Generator) -> Weights:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights = {
        "self_attn.q_proj.weight": _normal(rng, queries, hidden, hidden**-0.5),
        "self_attn.k_proj.weight": _normal(rng, keys, hidden, hidden**-0.5),
        "self_attn.v_proj.weight": _normal(rng, keys, hidden, hidden**-0.5),
        "self_attn.o_proj.weight": _normal(rng, hidden, queries, queries**-0.5),
        "mlp.gate_proj.weight": _normal(rng, inner, hidden, hidden**-0.5),
        "mlp.up_proj.weight": _normal(rng, inner, hidden, hidden**-0.5),
        "mlp.down_proj.weight": _normal(rng, hidden, inner, inner**-0.5),
        "input_layernorm.weight": np.ones(hidden, np.float32),
        "post_attention_layernorm.weight": np.ones(hidden, np.float32),
    }
    if config["model_type"] == "qwen3":
        weights["self_attn.q_norm.weight"] = np.ones(head_dim, np.float32)
        weights["self_attn.k_norm.weight"] = np.ones(head_dim, np.float32)
    return weights


def _word_head(rng: np.random.Generator, tokenizer: Tokenizer, hidden: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Output weights that are zero for all but whole words and stops, so that random output reads as words."""
    head = _normal(rng, tokenizer.get_vocab_size(), hidden, 3.0 * hidden**-0.5)
    for token, token_id in tokenizer.get_vocab().items():
        word = token.removeprefix("Ġ")
        if not (token in {".", ","} or (token != word and len(word) > 2 and word.isascii() and word.isalpha())):
            head[token_id] = 0.0
    return head


def _normal(rng: np.random.Generator, rows: int, columns: int, std: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)).astype(np.float32)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
