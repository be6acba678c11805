"""The error table."""

import inspect

import pytest

from shell_router import errors
from shell_router.api.replies import (
    INTERNAL,
    anthropic_error,
    is_retryable,
    list_shared_fields,
    problem_body,
    problem_of,
)
from shell_router.errors import (
    AdapterMissing,
    AgentFailed,
    EngineRejected,
    EngineStalled,
    InvalidField,
    ShellRouterError,
    WeightsLost,
)

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ShellRouterError)
]
INTERNAL_KINDS = {"ShellRouterError", "ConfigError", "DataError", "TopologyError"}


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.__name__ not in INTERNAL_KINDS],
)
def test_every_error_a_client_may_meet_has_a_status_of_its_own(
    kind: type[ShellRouterError],
) -> None:
    error = kind.__new__(kind)
    error.status = 500  # type: ignore[attr-defined] # what an engine may have answered
    assert problem_of(error) is not INTERNAL


def caused(cause: ShellRouterError) -> AgentFailed:
    error = AgentFailed("agent a failed")
    error.__cause__ = cause
    return error


def test_a_failed_agent_answers_as_its_cause_does() -> None:
    assert problem_of(AgentFailed("a failed")).status == 502
    assert problem_of(caused(EngineStalled("nothing came"))).status == 504


def test_what_an_engine_refuses_is_the_clients_to_mend_and_its_crashes_are_not() -> None:
    assert problem_of(EngineRejected("bad regex", status=400)).status == 400
    assert problem_of(EngineRejected("crash", status=500)).status == 502
    assert problem_of(caused(EngineRejected("bad regex", status=422))).status == 400


def test_weights_that_are_loaded_again_are_worth_another_try_and_a_missing_adapter_is_not() -> None:
    assert is_retryable(caused(WeightsLost("lost")))
    assert not is_retryable(AdapterMissing("never loaded"))


def test_the_envelope_names_field_type_and_remedy() -> None:
    error = InvalidField("n is wrong.", field="n", remedy="Leave it out.")
    openai = {
        "message": "n is wrong. Leave it out.",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_field",
    }
    assert problem_body(error, "id")["error"].items() >= openai.items()


def test_every_api_gives_all_fields_but_those_that_only_openai_has() -> None:
    error = {**problem_body(InvalidField("n is wrong.", field="n"), "id")["error"], "extra": 7}
    assert anthropic_error(error) == {**list_shared_fields(error), "type": "invalid_request_error"}
    assert list_shared_fields(error).keys() == error.keys() - {"type", "param", "code"}


def test_an_unexpected_error_gives_nothing_away() -> None:
    envelope = problem_body(RuntimeError("secret path /etc/x"), "req-1")["error"]
    assert "secret" not in envelope["message"] and "req-1" in envelope["message"]
