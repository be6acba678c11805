"""What is read from a completion and its trace."""

from typing import Any

from shell_router.lab.evaluation.records import ExitRecord, ReplyAgent, compute_layers, read_reply

COMPLETION = {
    "choices": [{"message": {"content": "Answer: 5"}}],
    "usage": {"prompt_tokens": 300, "completion_tokens": 30},
}


def _agent(
    state: str, *spans: str, precursors: tuple[str, ...] = (), **facts: int
) -> dict[str, Any]:
    reported = {
        "model": "small",
        "state": state,
        "decoded_tokens": 4,
        "precursors": precursors,
        **facts,
    }
    return {**reported, "spans": [{"name": name} for name in spans]}


def test_a_reply_has_the_text_the_usage_and_what_each_agent_did() -> None:
    finished = {"prompt_tokens": 100, "cached_tokens": 90, "completion_tokens": 12}
    agents = {
        "done": _agent("finished", "queue", "prefill", "decode", **finished),
        "sent": _agent("early_exit", "queue", "prefill"),
        "root": _agent("unneeded", "queue", "prefill_increment", precursors=("done", "sent")),
    }
    exits = [{"cluster": "c", "completed": ["done"], "exited": True, "start_s": 1.0, "end_s": 1.5}]
    reply = read_reply(COMPLETION, {"agents": agents, "exits": exits}, 2.0)
    assert (reply.text, reply.latency_s, reply.prompt_tokens, reply.completion_tokens) == (
        "Answer: 5",
        2.0,
        300,
        30,
    )
    assert reply.agents == (
        ReplyAgent("done", "small", 0, "finished", True, 100, 90, 12),
        ReplyAgent("sent", "small", 0, "early_exit", True, 0, 0, 4),
        ReplyAgent("root", "small", 1, "unneeded", False, 0, 0, 4),
    )
    assert reply.exits == (ExitRecord("c", 0, True, 0.5),)


def test_a_layer_is_the_longest_way_from_a_leaf_in_whatever_order_agents_are_listed() -> None:
    precursors = {"root": ("mid", "leaf"), "mid": ("leaf", "gone"), "leaf": ()}
    assert compute_layers(precursors) == {"root": 2, "mid": 1, "leaf": 0}
