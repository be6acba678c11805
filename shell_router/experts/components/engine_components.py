"""Components that are language models on engines: servers whose weights take turns.

A sample is a `Prompt`, an output a `Generated`; one that the engine refuses has a ComponentFailed in its place. There
is no host tier.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson

from shell_router.core.engine import Finish, Generation, Tokens
from shell_router.engines.weight_swapping import TensorShape, read_tensors, swap_weights
from shell_router.engines.wire import OutputReader, body_fields
from shell_router.errors import ComponentFailed, ConfigError, EngineError, EngineRejected, PromptTooLong
from shell_router.experts.components.values import Component, Costs, ExecutorSettings, Tier
from shell_router.experts.server_control import ServerControl

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sample: token ids, as models of a pool may have different tokenizers, and SGLang's `sampling_params`."""

    input_ids: tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generated:
    """An output: the ids and the text that were written, and how that ended."""

    ids: tuple[int, ...]
    text: str
    finish: Finish


class Generates(Protocol):
    """The part of `core.engine.Engine` that components need."""

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        ...


async def generate_all(
    engine: Generates, component: Component, prompts: Sequence[Prompt]
) -> Sequence[Generated | ComponentFailed]:
    """All at the same time; what an engine refuses, or fails on, fails that prompt alone."""

    async def generated(prompt: Prompt) -> Generated | ComponentFailed:
        ids, text = list[int](), list[str]()
        request = Generation(f"{random.getrandbits(128):032x}", prompt.input_ids, prompt.sampling)
        try:
            async with aclosing(engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Finish):
                        return Generated(tuple(ids), "".join(text), event)
                    ids += event.ids
                    text.append(event.text)
        except (EngineError, PromptTooLong) as error:
            failed = ComponentFailed(f"{component.name} did not answer: {error.args[0]}", remedy=error.remedy)
            failed.__cause__ = error
            return failed
        raise AssertionError("an answer ends with a Finish or raises")

    return await asyncio.gather(*map(generated, prompts))


def _refuse_host_memory(place: str) -> None:
    """Raise ConfigError for a load into host memory, where no engine keeps weights but in files."""
    if place == Tier.HOST:
        raise ConfigError(
            "Models of engines are not kept in host memory.",
            remedy="Open the pool with host_bytes=0: what was read lately is in the system's page cache.",
        )


SLOT_BYTES = 1
"""What a swapped component counts for: a server holds the weights of one, whatever their bytes."""


class WeightServer(ServerControl):
    """A server whose weights are replaced. All methods raise EngineUnreachable, EngineStalled or EngineRejected."""

    async def model_path(self) -> Path:
        """The folder of the weights that it serves."""
        return Path(orjson.loads(await self.done("GET", "/model_info"))["model_path"])

    async def swap(self, folder: Path) -> None:
        """See `swap_weights`."""
        await swap_weights(self.name, partial(self.done, "POST"), folder)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`, of a server that both prefills and decodes. It aborts what is abandoned."""
        reader = OutputReader(self.name, logprobs=request.logprobs)
        body = await self.done("POST", "/generate", body_fields(request))
        tokens = reader.take(body)
        if tokens is not None:
            yield tokens
        if reader.finish is None:
            raise EngineRejected(f"The {self.name} answered without an end.", status=502)
        yield reader.finish


@dataclass(frozen=True, slots=True)
class SwapPlace:
    """What one executor swaps weights on: a server, or the two of a pair, and the engine that asks them.

    They must get no other requests, which would be answered by whichever component is there. `component` is the one
    that they were started with, if it is one.
    """

    servers: tuple[WeightServer, ...]
    engine: Generates
    component: str | None = None


def swapped_component(
    name: str, architecture: str, usage: float = 0.0, after: frozenset[str] = frozenset()
) -> Component:
    """A component whose weights are swapped. It takes the server's only slot."""
    return Component(name, architecture, SLOT_BYTES, usage, after)


def swap_executor(name: str, costs: Mapping[str, Costs]) -> ExecutorSettings:
    """An executor of one server or pair, which holds one component. Raises ConfigError for costs that count bytes.

    The KV is the server's own, reserved at its start, so that samples take nothing from the pool's memory.
    """
    if counted := [architecture for architecture, one in costs.items() if one.activation_bytes]:
        raise ConfigError(
            f"The costs of {counted[0]} on {name} have activation_bytes.", remedy="Give 0: the server reserves its KV."
        )
    return ExecutorSettings(name, SLOT_BYTES, costs, component_share=1.0)


class SwappedComponents:
    """Meets `values.Components`.

    `folder_of` names a component's checkpoint, which lies at the same path on the servers' machines; all have tensors
    of the same names, types and sizes. Unloading leaves the weights where they are, until others take their place: a
    component that comes back in between needs no swap.
    """

    def __init__(self, folder_of: Callable[[str], Path], places: Mapping[str, SwapPlace]) -> None:
        self._folder_of = folder_of
        self._places = places
        self._holds: dict[str, str | None] = {name: place.component for name, place in places.items()}
        self._loaded: dict[str, str] = {}
        self._swapped_in: dict[str, Path] = {}
        self._shapes: dict[str, Mapping[str, TensorShape]] = {}

    async def load(self, component: Component, place: str) -> None:
        """Have all servers of the place read the weights, and drop the KV of those before.

        Raises ConfigError for a checkpoint that is missing, cut off or of another shape: servers are not asked then,
        and go on with what they had. (SGLang 0.5.23 ends where it is asked for one that it cannot read to the end.)
        Raises EngineError where a server fails; then nothing is known of what it holds, and the next load sets it.
        """
        _refuse_host_memory(place)
        if other := self._loaded.get(place):
            raise ConfigError(
                f"{place} holds {other} already, and one at a time.", remedy="Make its executor with swap_executor."
            )
        if self._holds[place] != component.name:
            await self._swap(component.name, place)
        self._loaded[place] = component.name

    async def _swap(self, name: str, place: str) -> None:
        folder, servers = self._folder_of(name), self._places[place].servers
        await self._check(folder, place)
        self._holds[place] = None
        outcomes = await asyncio.gather(*(server.swap(folder) for server in servers), return_exceptions=True)
        if failed := [one for one in outcomes if isinstance(one, BaseException)]:
            raise failed[0]
        self._holds[place], self._swapped_in[place] = name, folder

    async def _has(self, name: str, place: str) -> bool:
        """Whether its servers have these weights still: one that was started again has those of its start."""
        folder = self._swapped_in.get(place)
        if self._holds[place] == name and folder is not None:
            served = await asyncio.gather(*(server.model_path() for server in self._places[place].servers))
            return all(path == folder for path in served)
        return self._holds[place] == name

    async def _check(self, folder: Path, place: str) -> None:
        found = await asyncio.to_thread(read_tensors, folder)
        wanted = self._shapes.get(place)
        if wanted is None:
            served = await self._places[place].servers[0].model_path()
            wanted = self._shapes[place] = await asyncio.to_thread(read_tensors, served)
        if found != wanted:
            other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise ConfigError(
                f"{folder} is of another shape than {place} serves: {len(other)} tensors differ, {other[0]} first.",
                remedy="Swap checkpoints of one architecture and one type of numbers.",
            )

    async def unload(self, component: Component, place: str) -> None:
        """At once: see above."""
        del self._loaded[place]

    async def run(self, component: Component, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One `Generated` or ComponentFailed per `Prompt`.

        Servers that have lost the weights get them again. Raises ComponentFailed where they lose them meanwhile, and
        EngineError where a server fails.
        """
        if not await self._has(component.name, place):
            log.warning("%s has not the weights of %s any more: they are swapped in again", place, component.name)
            await self._swap(component.name, place)
        outputs = await generate_all(self._places[place].engine, component, samples)
        if not await self._has(component.name, place):
            raise ComponentFailed(
                f"{place} lost the weights of {component.name} while it answered.", remedy="Ask again."
            )
        return outputs
