"""How alike a question's drafts are, as Faster-MoA's early exit measures it: a confidence that reads no answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from shell_router.batch.asking import Batch, Outputs
from shell_router.batch.journal import Output
from shell_router.core.embedding import Embedder, TokenStates
from shell_router.early_exit.agreement import features
from shell_router.early_exit.gate import ClusterGate
from shell_router.early_exit.settings import EarlyExit

MEASURED = EarlyExit(policy="threshold")


async def compared(batch: Batch, outputs: Outputs, embedder: Embedder | None) -> Batch:
    """The batch with the likeness of every question's drafts, where its gate asks for it. Raises EngineError."""
    if embedder is None or batch.aggregating is None or batch.aggregating.confidence != "similarity":
        return batch
    alike = {}
    for question in batch.questions:
        drafts = batch.judged(question, outputs).drafts
        states = [await embedder.embed(draft.text) for draft in drafts]
        alike[question.id] = await asyncio.to_thread(_likeness, drafts, states)
    return replace(batch, alike=alike)


def _likeness(drafts: Sequence[Output], states: Sequence[TokenStates]) -> float:
    """P of all drafts together (Algorithm 1, lines 3 to 11), weighted by how sure each is; 0 for fewer than two."""
    gate = ClusterGate(MEASURED)
    scores = [gate.complete(draft.confidence, features(one)) for draft, one in zip(drafts, states, strict=True)]
    return scores[-1].agreement if scores and scores[-1] else 0.0
