"""Routing drawn at random: skewed popularity, sparse strong pairs as Gimbal's figures 3 and 4 show,
and topics.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shell_router.experts.placement import ExpertRecord, build_record

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose `top_k` of `experts` in each of `layers`: by the highest noisy logits.

    An expert's popularity in a layer is log-normal with deviation `skew`. A share `linked` of a
    layer's experts has one follower in the next layer, whose logit is `strength` higher for a token
    that chose the first. Each token has one of `topics`, for which its share of each layer's
    experts, drawn anew in each, is `topical` higher. `seed` fixes all of this, not the tokens.
    """

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    skew: float = 0.7
    linked: float = 0.25
    strength: float = 4.0
    topics: int = 1
    topical: float = 0.0
    seed: int = 0


def drawn(routing: Routing, tokens: int = 4000, *, sample: int = 0) -> ExpertRecord:
    """A record of `tokens` tokens; another `sample` has other tokens of the same model."""
    model = np.random.default_rng((routing.seed, 0))
    draw = np.random.default_rng((routing.seed, 1 + sample))
    topic_of = draw.integers(routing.topics, size=tokens)
    chosen = [_chosen(_logits(routing, topic_of, model, draw), routing.top_k)]
    for _ in range(1, routing.layers):
        logits = _logits(routing, topic_of, model, draw)
        logits += routing.strength * chosen[-1] @ _followers(routing, model)
        chosen.append(_chosen(logits, routing.top_k))
    activations = np.array([layer.sum(axis=0) for layer in chosen])
    transitions = np.array([one.T @ after for one, after in pairwise(chosen)])
    return build_record(activations.astype(np.int64), transitions.astype(np.int64))


def _logits(
    routing: Routing,
    topic_of: NDArray[np.int64],
    model: np.random.Generator,
    draw: np.random.Generator,
) -> Floats:
    """[tokens, experts]: a layer's popularity and topics from `model`, with Gumbel noise from
    `draw`.
    """
    noise = draw.standard_exponential((len(topic_of), routing.experts), dtype=np.float32)
    logits = -np.log(noise.clip(np.finfo(np.float32).tiny))
    logits += model.normal(0, routing.skew, routing.experts).astype(np.float32)
    topic = model.permutation(np.arange(routing.experts) % routing.topics)
    logits += np.float32(routing.topical) * (topic == topic_of[:, None])
    return logits


def _chosen(logits: Floats, top_k: int) -> Floats:
    """[tokens, experts]: 1 for the `top_k` highest of each token."""
    chosen = np.zeros_like(logits)
    highest = np.argpartition(-logits, top_k - 1, axis=1)[:, :top_k]
    np.put_along_axis(chosen, highest, np.float32(1), axis=1)
    return chosen


def _followers(routing: Routing, model: np.random.Generator) -> Floats:
    """[experts, experts]: 1 where the second is the follower of the first."""
    links = np.zeros((routing.experts, routing.experts), dtype=np.float32)
    number = round(routing.linked * routing.experts)
    leaders, followers = (model.choice(routing.experts, number, replace=False) for _ in range(2))
    links[leaders, followers] = 1
    return links
