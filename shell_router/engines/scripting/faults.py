"""How each fault shows on the wire."""

from shell_router.engines.scripting.run import ScriptedRun
from shell_router.engines.scripting.script import Fault


def strike(run: ScriptedRun, fault: Fault) -> bool:
    """Write a stream's tokens before the fault, then let it happen. True when the answer has ended with it."""
    events = run.events(fault.after_tokens) if run.sent < fault.after_tokens else []
    run.ended = True
    last = fault.kind in ("garbage", "error_event", "abort")
    if last:
        events.append(_last_event(run, fault))
    if events:
        run.exchange.write(events, last=last)
    if fault.kind == "close":
        run.exchange.drop()
    return last


def _last_event(run: ScriptedRun, fault: Fault) -> bytes:
    if fault.kind == "garbage":
        return b"data: {broken\n\n"
    if fault.kind == "error_event":
        return run.framed({"error": {"message": fault.message, "code": fault.status}})
    return run.framed(run.aborted(fault.message, fault.status))


def strike_whole(run: ScriptedRun, fault: Fault) -> None:
    """Let the fault happen in place of an answer that is not streamed."""
    if fault.kind == "close":
        run.exchange.drop()
    elif fault.kind == "garbage":
        run.exchange.answer(200, b"{broken")
    else:
        run.exchange.answer_json({"error": {"message": fault.message}}, fault.status)
