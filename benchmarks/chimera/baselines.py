"""Choices of models to compare the router's with: by load alone, and in turn."""

from itertools import count

from shell_router.routing.model_choice import POLICIES, Candidate, ModelPolicy, ModelScene


def least_loaded(scene: ModelScene) -> tuple[Candidate, str]:
    """Algorithm 1's m_fast, whatever the scores."""
    return scene.fastest, "least_loaded"


def taking_turns() -> ModelPolicy:
    """One after the other."""
    turns = count()
    return ModelPolicy(
        lambda scene: (scene.candidates[next(turns) % len(scene.candidates)], "in_turn"),
        scores_decide=lambda scene: False,
    )


def enter_baselines() -> None:
    """Let settings name `least_loaded` and a `round_robin` that begins with the first model."""
    POLICIES.update(
        least_loaded=ModelPolicy(least_loaded, lambda scene: False), round_robin=taking_turns()
    )
