"""A tiny random-weight checkpoint with its own tokenizer: real files, made in a second, that read
as words.

Written with NumPy and safetensors alone, so that making one needs no torch.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shell_router.errors import require

NOUNS = (
    "agent answer apple bridge castle cloud cluster coin corner engine farmer field flower "
    "forest garden harbor "
    "island journey kettle ladder lantern layer letter market meadow memory mirror morning "
    "mountain music number "
    "ocean orange paper pattern pencil picture planet pocket problem question rabbit reason "
    "river school season "
    "shadow signal silver solution station story student summer sunset table teacher theory "
    "thunder token tower "
    "traveler tree valley village voice water weather window winter wonder writer"
)
VERBS = (
    "asks becomes begins builds carries changes counts crosses draws explains finds follows "
    "gives grows hears helps "
    "holds keeps knows learns leaves makes measures meets moves needs opens paints reads "
    "remembers sees shows solves "
    "speaks starts takes tells thinks turns watches writes"
)
ADJECTIVES = (
    "ancient bright broken calm careful clever cold distant early empty final gentle golden "
    "green happy heavy hidden "
    "large little lonely narrow patient quick quiet round second sharp simple slow small strange "
    "strong sudden "
    "third warm whole wide young"
)
LINKS = ("and", "because", "before", "but", "so", "then", "when", "while", "after", "although")
OPENERS = ("the", "a", "every", "this", "that", "some", "one", "no")


SENTENCES = 1500
Architecture = Literal["qwen3", "llama"]
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The layout of Qwen's ChatML template, without tools.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' "
    "}}{% endif %}"
)

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": TURN_END,
    "pad_token": END_OF_TEXT,
    "additional_special_tokens": [TURN_START, TURN_END],
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def _training_text(variant: int) -> str:
    """Variant 0 knows every word; the others lack some, so that they cut the same text
    differently."""
    rng = random.Random(f"corpus/{variant}")
    nouns, verbs, adjectives = (kind.split()[6 * variant :] for kind in (NOUNS, VERBS, ADJECTIVES))

    def clause() -> str:
        subject = f"{rng.choice(OPENERS)} {rng.choice(adjectives)} {rng.choice(nouns)}"
        return f"{subject} {rng.choice(verbs)} {rng.choice(OPENERS)} {rng.choice(nouns)}"

    def sentence() -> str:
        first, *others = [clause() for _ in range(rng.randint(1, 3))]
        text = first + "".join(f", {rng.choice(LINKS)} {one}" for one in others)
        return text[0].upper() + text[1:] + rng.choice((".", ".", "!", "?"))

    return " ".join(sentence() for _ in range(SENTENCES))


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

    Equal arguments give equal files. Checkpoints of one `tokenizer_variant` and `vocab_size` share
    their tokenizer whatever their `seed`; another variant has another vocabulary. Raises
    `ConfigError` on sizes that do not fit.
    """
    require(
        architecture in ("qwen3", "llama"),
        f"architecture {architecture!r} is unknown.",
        "Choose qwen3 or llama.",
    )
    require(
        hidden % heads == 0 and heads % kv_heads == 0 and hidden // heads % 2 == 0,
        f"hidden {hidden}, heads {heads} and kv_heads {kv_heads} do not fit.",
        "heads must divide hidden into even parts, and kv_heads must divide heads.",
    )
    tokenizer = _train_tokenizer(vocab_size, tokenizer_variant)
    config = {
        **{"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers},
        **{
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads,
        },
        **{"max_position_embeddings": context_length, **_fixed_config(architecture, tokenizer)},
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config", {**TOKENIZER_CONFIG, "model_max_length": context_length}),
        ("config", config),
        ("generation_config", {"eos_token_id": config["eos_token_id"], "do_sample": False}),
    ):
        (target / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(
        _weights(config, tokenizer, seed), target / "model.safetensors", metadata={"format": "pt"}
    )
    return target


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A model's width, a multiple of 32, its layers, and what fixes its weights."""

    hidden: int = 64
    layers: int = 2
    seed: int = 0

    def __str__(self) -> str:
        return f"random weights, {self.layers} layers of {self.hidden}"


def make_random_model(weights: RandomWeights, folder: Path) -> Path:
    """Write the model into `folder` and return it; the same `weights` give the same files."""
    hidden, heads = weights.hidden, weights.hidden // 16
    return make_checkpoint(
        folder,
        hidden=hidden,
        layers=weights.layers,
        heads=heads,
        kv_heads=heads // 2,
        seed=weights.seed,
    )


MOE_LAYERS, EXPERTS, TOP_K = 4, 16, 4


def make_moe_checkpoint(
    folder: Path, *, hidden: int = 64, inner: int = 32, popular_first: bool = False, seed: int = 0
) -> Path:
    """A mixture of experts: MOE_LAYERS layers, each of EXPERTS experts `inner` wide of which a
    token chooses TOP_K.

    Some are chosen far more often; with `popular_first` those have the lowest numbers.
    """
    make_checkpoint(folder, hidden=hidden, layers=MOE_LAYERS, seed=seed, context_length=4096)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {
        name: value
        for name, value in load_file(folder / "model.safetensors").items()
        if ".mlp." not in name
    }
    draw = np.random.default_rng(seed)
    for layer in range(MOE_LAYERS):
        loudness = draw.lognormal(0, 0.5, (EXPERTS, 1)).astype(np.float32)
        if popular_first:
            loudness = -np.sort(-loudness, axis=0)
        weights |= _experts(f"model.layers.{layer}.mlp", hidden, inner, loudness, draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _experts(
    prefix: str,
    hidden: int,
    inner: int,
    loudness: np.ndarray[Any, np.dtype[np.float32]],
    draw: np.random.Generator,
) -> Weights:
    def drawn(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (columns**-0.5 * draw.standard_normal((rows, columns))).astype(np.float32)

    weights = {f"{prefix}.gate.weight": loudness * drawn(EXPERTS, hidden)}
    for expert in range(EXPERTS):
        of = f"{prefix}.experts.{expert}"
        weights[f"{of}.gate_proj.weight"] = drawn(inner, hidden)
        weights[f"{of}.up_proj.weight"] = drawn(inner, hidden)
        weights[f"{of}.down_proj.weight"] = drawn(hidden, inner)
    return weights


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


def _fixed_config(architecture: Architecture, tokenizer: Tokenizer) -> dict[str, Any]:
    """What no size of the network is in."""
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[architecture]],
        "model_type": architecture,
        "vocab_size": tokenizer.get_vocab_size(),
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
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (
        config["num_attention_heads"] * head_dim,
        config["num_key_value_heads"] * head_dim,
    )
    projections = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    weights: Weights = {
        "model.embed_tokens.weight": _normal(rng, tokenizer.get_vocab_size(), hidden, 1.0)
    }
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in projections.items():
            weights[f"model.layers.{layer}.{name}.weight"] = _normal(
                rng, rows, columns, columns**-0.5
            )
        for name, size in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(size, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    weights["lm_head.weight"] = _word_head(rng, tokenizer, hidden)
    return weights


def _word_head(
    rng: np.random.Generator, tokenizer: Tokenizer, hidden: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Output weights that are zero for all but whole words and stops, so that random output reads
    as words.
    """
    head = _normal(rng, tokenizer.get_vocab_size(), hidden, 3.0 * hidden**-0.5)
    for token, token_id in tokenizer.get_vocab().items():
        word = token.removeprefix("Ġ")
        if not (
            token in {".", ","}
            or (token != word and len(word) > 2 and word.isascii() and word.isalpha())
        ):
            head[token_id] = 0.0
    return head


def _normal(
    rng: np.random.Generator, rows: int, columns: int, std: float
) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)).astype(
        np.float32
    )
