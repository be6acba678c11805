"""Which adapters are loaded, and that none goes under a request."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.adapter_files import AdapterRefused
from shell_router.standins.embedded.adapters import Adapter, LoadedAdapters


class Disk:
    """Adapters by folder; reads wait while `gate` is not set. `forgotten` has names."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.forgotten: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, name: str, path: str) -> Adapter:
        self.reads.append(name)
        if not self.gate.wait(10):
            raise TimeoutError("the test that opens the gate waits for this")
        if path == "corrupt":
            raise AdapterRefused("corrupt cannot be read.")
        return Adapter(name, path, "", {})

    async def forget(self, adapter: Adapter) -> None:
        self.forgotten.append(adapter.name)

    def shelf(self, limit: int = 2) -> LoadedAdapters:
        return LoadedAdapters(limit, self.read, self.forget)


async def until(holds: Callable[[], bool]) -> None:
    """Let others run until `holds`."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for is in another thread
            await asyncio.sleep(0)


async def test_a_loaded_adapter_is_used_by_its_name() -> None:
    adapters = Disk().shelf()
    await adapters.load("a", "folders/a")
    with adapters.used("a") as adapter:
        assert adapter is not None
        assert (adapter.name, adapter.path) == ("a", "folders/a")
    assert adapters.paths == {"a": "folders/a"}


@pytest.mark.parametrize("name", [None, ""])
async def test_no_name_is_no_adapter(name: str | None) -> None:
    with Disk().shelf(limit=0).used(name) as adapter:
        assert adapter is None


async def test_an_adapter_that_is_not_loaded_is_refused_with_those_that_are() -> None:
    adapters = Disk().shelf()
    await adapters.load("a", "a")
    with pytest.raises(InvalidRequest, match=r"not loaded: b\. Loaded adapters: a\."), adapters.used("b"):
        pass


async def test_over_its_limit_nothing_is_read() -> None:
    disk = Disk()
    adapters = disk.shelf(limit=2)
    await adapters.load("a", "a")
    await adapters.load("b", "b")
    with pytest.raises(AdapterRefused, match=r"at most 2.*\(a, b\)"):
        await adapters.load("c", "c")
    assert disk.reads == ["a", "b"]


async def test_loads_that_come_together_take_no_more_than_the_limit() -> None:
    adapters = Disk().shelf(limit=2)
    names = "abcde"
    outcomes = await asyncio.gather(*(adapters.load(name, name) for name in names), return_exceptions=True)
    assert sum(isinstance(outcome, AdapterRefused) for outcome in outcomes) == 3
    assert len(adapters.paths) == 2


async def test_a_name_is_loaded_once() -> None:
    adapters = Disk().shelf()
    await adapters.load("a", "a")
    with pytest.raises(AdapterRefused, match="already loaded"):
        await adapters.load("a", "elsewhere")


async def test_an_adapter_that_cannot_be_read_takes_no_place() -> None:
    adapters = Disk().shelf(limit=1)
    with pytest.raises(AdapterRefused, match="cannot be read"):
        await adapters.load("bad", "corrupt")
    await adapters.load("good", "good")
    assert list(adapters.paths) == ["good"]


async def test_unloading_refuses_new_requests_at_once_and_waits_for_those_in_work() -> None:
    disk = Disk()
    adapters = disk.shelf(limit=1)
    await adapters.load("a", "a")
    with ExitStack() as requests:
        for _ in range(2):
            requests.enter_context(adapters.used("a"))
        unloading = asyncio.create_task(adapters.unload("a"))
        await until(lambda: not adapters.paths)
        with pytest.raises(InvalidRequest, match="not loaded"), adapters.used("a"):
            pass
        loading = asyncio.create_task(adapters.load("b", "b"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (unloading.done(), loading.done(), disk.forgotten, disk.reads) == (False, False, [], ["a"])
    async with asyncio.timeout(10):
        await asyncio.gather(unloading, loading)
    assert disk.forgotten == ["a"]
    assert list(adapters.paths) == ["b"]


async def test_under_an_old_name_a_new_adapter_is_another_owner_of_kv() -> None:
    adapters = Disk().shelf(limit=1)
    loaded = set()
    for _ in range(2):
        await adapters.load("a", "a")
        with adapters.used("a") as adapter:
            assert adapter is not None
            loaded.add(adapter)
        await adapters.unload("a")
    assert len(loaded) == 2


async def test_an_unknown_name_cannot_be_unloaded() -> None:
    with pytest.raises(AdapterRefused, match="LoRA with name a does not exist"):
        await Disk().shelf().unload("a")


async def test_with_a_limit_of_zero_lora_is_off() -> None:
    adapters = Disk().shelf(limit=0)
    for change in (adapters.load("a", "a"), adapters.unload("a")):
        with pytest.raises(AdapterRefused, match="LoRA is not enabled"):
            await change
    with pytest.raises(InvalidRequest, match="LoRA is not enabled"), adapters.used("a"):
        pass


async def test_a_change_ends_though_its_caller_has_left() -> None:
    disk = Disk()
    adapters = disk.shelf()
    disk.gate.clear()
    asked = asyncio.create_task(adapters.load("a", "a"))
    await until(lambda: disk.reads == ["a"])
    asked.cancel()
    await asyncio.wait({asked})
    disk.gate.set()
    await until(lambda: "a" in adapters.paths)


async def test_requests_go_on_while_an_adapter_is_read() -> None:
    disk = Disk()
    adapters = disk.shelf()
    await adapters.load("a", "a")
    disk.gate.clear()
    loading = asyncio.create_task(adapters.load("b", "b"))
    await until(lambda: disk.reads == ["a", "b"])
    with adapters.used("a") as adapter:
        assert adapter is not None
    assert not loading.done()
    disk.gate.set()
    await loading


async def test_stopping_gives_up_an_unloading_that_waits() -> None:
    adapters = Disk().shelf()
    await adapters.load("a", "a")
    with adapters.used("a"):
        unloading = asyncio.create_task(adapters.unload("a"))
        await until(lambda: not adapters.paths)
        await adapters.stop()
        with pytest.raises(asyncio.CancelledError):
            await unloading
