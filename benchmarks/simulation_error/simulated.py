"""The same settings and workload, simulated from measured costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.simulation_error.real import Trace, Workload
from shell_router.lab.simulation.run import simulate
from shell_router.lab.simulation.settings import (
    Length,
    SimulatedEmbedding,
    SimulatedModel,
    Simulation,
)
from shell_router.lab.simulation.settings import Workload as SimulatedWorkload
from shell_router.standins.simulated.costs import PairCosts
from shell_router.topology import Topology


def simulated_traces(
    topology: Topology,
    costs: Mapping[str, PairCosts],
    workload: Workload,
    at_once: int,
    cores: Sequence[float],
    embedder: SimulatedEmbedding,
    confidence: float,
) -> Sequence[Trace]:
    """As many runs as the workload has in as many rounds as `cores` has entries, each from idle,
    forgetful engines.
    """
    asked = SimulatedWorkload(
        requests=at_once * workload.turns,
        outputs=dict.fromkeys(costs, Length(tokens=workload.new_tokens)),
        question=Length(tokens=workload.question_tokens),
        arrivals="closed",
        clients=at_once,
        confidence=confidence,
    )
    simulation = Simulation(
        topologies=(Path(),),
        profiles=Path(),
        models={alias: SimulatedModel(alias) for alias in costs},
        workload=asked,
        embedder=embedder,
    )
    return [
        run.trace
        for seed, left in enumerate(cores)
        for run in simulate(replace(simulation, cores=left), topology, costs, seed).runs
        if not run.error
    ]
