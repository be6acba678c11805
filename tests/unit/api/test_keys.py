"""Who may call, and what a key lets its holder do."""

import pytest

from shell_router.api.keys import LOCAL, Keys, require_local, require_route
from shell_router.api.services import ApiSettings
from shell_router.config import ApiKey
from shell_router.errors import ConfigError, Forbidden, RemoteRefused, Unauthorized


def now() -> float:
    return 0.0


KEYS = Keys(
    {
        "alice": "sk-alice",
        "bob": ApiKey(key="sk-bob-ü"),
        "old": ApiKey(key="sk-old", tenant="alice"),
    }
)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_without_keys_callers_on_this_machine_may_do_all(peer: str) -> None:
    require_local(peer, "", None)
    require_route(LOCAL, "PUT", "/v1/topologies/x", "/v1/topologies/{name}")


@pytest.mark.parametrize(
    "peer", ["10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", "fe80::1%eth0", "0.0.0.0"]
)
def test_without_keys_all_others_are_refused(peer: str) -> None:
    with pytest.raises(RemoteRefused, match="api_keys"):
        require_local(peer, "", None)


def test_the_tenant_is_what_the_key_says() -> None:
    assert KEYS.find("Bearer sk-alice", now).tenant == "alice"
    assert KEYS.find("bearer sk-bob-ü", now).tenant == "bob"
    assert KEYS.find("Bearer sk-old", now).tenant == "alice"
    assert KEYS.several and not Keys({"a": "x", "b": ApiKey(key="y", tenant="a")}).several


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer ", "Bearer sk-alic", "Basic sk-alice", "sk-alice", "Bearer \udcff"],
)
def test_a_missing_or_wrong_key_is_refused(sent: str) -> None:
    with pytest.raises(Unauthorized):
        KEYS.find(sent, now)


@pytest.mark.parametrize("keys", [{"a": ""}, {"": "x"}, {"a": "x", "b": "x"}])
def test_empty_or_shared_keys_are_refused_and_those_before_stay(keys: dict[str, str]) -> None:
    held = Keys({"alice": "sk-alice"})
    with pytest.raises(ConfigError, match="keys"):
        held.take(keys)
    assert held.find("Bearer sk-alice", now).tenant == "alice"


def test_settings_do_not_print_secrets() -> None:
    assert "sk-alice" not in repr(
        ApiSettings(keys={"alice": "sk-alice", "bob": ApiKey(key="sk-alice-2")})
    )
    assert "sk-alice" not in repr(ApiKey(key="sk-alice"))


@pytest.mark.parametrize(
    "expires",
    ["2027-01-31", "2027-01-31T00:00:00Z", "2027-01-31T00:00:00", "2027-01-31T01:00:00+01:00"],
)
def test_an_expired_key_is_refused_by_name_of_its_time(expires: str) -> None:
    keys = Keys({"alice": ApiKey(key="x", expires=expires)})
    assert keys.find("Bearer x", lambda: 1801353599).tenant == "alice"
    with pytest.raises(Unauthorized, match=r"expired at 2027-01-31"):
        keys.find("Bearer x", lambda: 1801353600)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1", "/generate"])
def test_a_key_for_some_routes_may_use_them_and_what_is_below(path: str) -> None:
    require_route(
        ApiKey(key="x", routes=("/v1/files", "/generate/")),
        "GET",
        path.replace("/generate", "/generate/x"),
        "r",
    )


@pytest.mark.parametrize("path", ["/v1/filesystem", "/v1", "/", "/metrics"])
def test_a_key_for_some_routes_may_use_no_others(path: str) -> None:
    with pytest.raises(Forbidden, match="/v1/files"):
        require_route(ApiKey(key="x", routes=("/v1/files",), operator=True), "GET", path, path)


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", "/metrics"),
        ("HEAD", "/metrics"),
        ("PUT", "/v1/topologies/{name}"),
        ("DELETE", "/v1/topologies/{name}"),
    ],
)
def test_administration_is_for_operators(method: str, route: str) -> None:
    require_route(ApiKey(key="x", operator=True), method, route, route)
    with pytest.raises(Forbidden, match="operator"):
        require_route(ApiKey(key="x"), method, route, route)


def test_all_may_read_topologies() -> None:
    require_route(ApiKey(key="x"), "GET", "/v1/topologies/duo", "/v1/topologies/{name}")
