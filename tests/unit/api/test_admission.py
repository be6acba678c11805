"""Who may call, and how running requests end with their server."""

import asyncio

import pytest

from shell_router.api.admission import LOCAL_TENANT, Drain, tenant_of
from shell_router.api.services import ApiSettings
from shell_router.errors import RemoteRefused, RouterStopping, Unauthorized

KEYS = {"alice": "sk-alice", "bob": "sk-bob-ü"}


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", None])
def test_without_keys_callers_on_this_machine_are_served(peer: str | None) -> None:
    assert tenant_of({}, "", peer) == LOCAL_TENANT


@pytest.mark.parametrize("peer", ["10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", "fe80::1%eth0", "0.0.0.0"])
def test_without_keys_all_others_are_refused(peer: str) -> None:
    with pytest.raises(RemoteRefused, match="api_keys"):
        tenant_of({}, "Bearer sk-alice", peer)


def test_with_keys_the_tenant_is_the_keys_name_wherever_the_caller_is() -> None:
    assert tenant_of(KEYS, "Bearer sk-alice", "10.0.0.1") == "alice"
    assert tenant_of(KEYS, "bearer sk-bob-ü", "127.0.0.1") == "bob"


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer sk-alic", "Basic sk-alice", "sk-alice"])
def test_with_keys_a_missing_or_wrong_one_is_refused_on_this_machine_too(given: str) -> None:
    with pytest.raises(Unauthorized):
        tenant_of(KEYS, given, "127.0.0.1")


@pytest.mark.parametrize("keys", [{"a": ""}, {"": "x"}, {"a": "x", "b": "x"}])
def test_empty_or_shared_keys_are_refused_at_start(keys: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="keys"):
        ApiSettings(keys=keys)


def test_settings_do_not_print_secrets() -> None:
    assert "sk-alice" not in repr(ApiSettings(keys=KEYS))


async def test_a_stop_cuts_what_still_runs_and_leaves_what_has_reached_its_own_limit_to_end() -> None:
    drain, begun, all_cut, forced = Drain(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def overdue() -> None:
        """Its limit is over, and it still has to leave its engine."""
        try:
            async with drain.deadline(0):
                try:
                    await asyncio.Event().wait()
                finally:
                    begun.set()
                    await all_cut.wait()
        finally:
            drain.ended()

    async def running() -> None:
        try:
            async with drain.deadline(3600):
                await asyncio.Event().wait()
        finally:
            all_cut.set()
            drain.ended()

    drain.running = 2
    requests = [asyncio.create_task(one) for one in (overdue(), running())]
    await begun.wait()
    forced.set()
    async with asyncio.timeout(10):
        await drain.finish(3600, forced)
        ended = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(error) for error in ended] == [TimeoutError, RouterStopping]
