"""Which engines of a deployment are started on this machine, and what must be there before. Pure."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shell_router.config import Config, ModelSettings, RandomWeights
from shell_router.errors import ConfigError
from shell_router.launching.commands import EngineCommand, commands

MAKE_WEIGHTS = ("-m", "shell_router.launching.weights")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`weights` run to their end first, then `engines` are started; those `elsewhere` are only waited for.

    `config` is the deployment with the folder of each launched model in the place of its random weights.
    """

    config: Config
    folder: Path
    weights: tuple[tuple[str, ...], ...]
    engines: tuple[EngineCommand, ...]
    elsewhere: tuple[EngineCommand, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Every command as a line for a shell, in the order in which they are run."""
        return [*map(shlex.join, self.weights), *(engine.shell for engine in self.engines)]


def plan(config: Config, *, folder: Path, python: str, machine: str | None = None) -> LaunchPlan:
    """What to start on `machine`, a host of the deployment's URLs; None where they name only one.

    `folder` takes logs and random weights, `python` is the router's own interpreter. Raises ConfigError.
    """
    made = {alias: model.random for alias, model in config.models.items() if model.random and model.pairs}
    folders = {alias: folder / "models" / _weights_name(weights) for alias, weights in made.items()}
    resolved = replace(config, models={alias: _on(model, folders.get(alias)) for alias, model in config.models.items()})
    engines = commands(resolved, python=python)
    here = _machine(engines, machine)
    return LaunchPlan(
        config=resolved,
        folder=folder,
        weights=_weights(made, folders, python),
        engines=tuple(engine for engine in engines if engine.host == here),
        elsewhere=tuple(engine for engine in engines if engine.host != here),
    )


def _on(model: ModelSettings, folder: Path | None) -> ModelSettings:
    return model if folder is None else replace(model, path=folder, random=None)


def _weights(
    made: Mapping[str, RandomWeights], folders: Mapping[str, Path], python: str
) -> tuple[tuple[str, ...], ...]:
    """One command per different model, in the deployment's order."""
    return tuple(
        dict.fromkeys(
            (
                *(python, *MAKE_WEIGHTS, str(folders[alias])),
                *("--hidden", str(weights.hidden), "--layers", str(weights.layers), "--seed", str(weights.seed)),
            )
            for alias, weights in made.items()
        )
    )


def _weights_name(weights: RandomWeights) -> str:
    return f"random-{weights.hidden}-{weights.layers}-{weights.seed}"


def _machine(engines: list[EngineCommand], machine: str | None) -> str:
    hosts = list(dict.fromkeys(engine.host for engine in engines))
    if not hosts:
        raise ConfigError(
            "no pair of this deployment is to be started.", remedy="Add `launch: {}` to a pair; see docs/launching.md."
        )
    if machine is None and len(hosts) == 1:
        return hosts[0]
    if machine not in hosts:
        known = "which of them this machine is, is not said" if machine is None else f"{machine!r} is none of them"
        raise ConfigError(
            f"the engines are on {', '.join(hosts)}; {known}.",
            remedy=f"Name this machine, as in --machine {hosts[0]}.",
        )
    return machine
