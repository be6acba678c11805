"""Records by hand, for tests of what is made of them."""

from shell_router.evaluation.records import AgentRecord, ExitRecord, Record


def agent(model: str = "small", state: str = "finished", tokens: int = 10, **fields: object) -> AgentRecord:
    """One agent: of 100 prompt tokens it found 80 cached, if it finished."""
    done = state == "finished"
    facts = {
        "agent": f"{model}-1",
        "layer": 0,
        "started": True,
        "prompt_tokens": 100 * done,
        "cached_tokens": 80 * done,
    }
    return AgentRecord(model=model, state=state, completion_tokens=tokens, **(facts | fields))  # type: ignore[arg-type]


def judged(cluster: str, exited: bool, duration_s: float, layer: int = 0) -> ExitRecord:
    """One judgement."""
    return ExitRecord(cluster, layer, exited, duration_s)


def record(setting: str, question: int, right: bool = True, latency_s: float = 1.0, **fields: object) -> Record:
    """One answer; `fields` are a Record's."""
    facts: dict[str, object] = {"seed": 0, "stated": "1", "prompt_tokens": 100, "completion_tokens": 10}
    return Record(question, setting=setting, right=right, latency_s=latency_s, **(facts | fields))  # type: ignore[arg-type]


def failed(setting: str, question: int, error: str = "The router answered 502: no engine") -> Record:
    """A request that got no answer."""
    return Record(question, 0, setting, right=False, stated=None, latency_s=0.0, error=error)
