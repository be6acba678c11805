"""The graph of a running request, drawn from left to right, and the root's answer as it streams."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shell_router.demo.client import delta
from shell_router.demo.states import LOOKS, Progress
from shell_router.evaluation.dataset import Item
from shell_router.topology import Topology


class Picture:
    """Follows one request through the chunks of its stream; rich draws it."""

    def __init__(self, topology: Topology, item: Item) -> None:
        self._topology = topology
        self._item = item
        self._progress = {agent: Progress() for agent in topology.agents}
        self._answer = ""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take in one chunk of the stream."""
        if text := delta(chunk):
            root = self._progress[self._topology.root.id]
            root.state, root.decoded = "decoding", root.decoded + 1  # one chunk holds about one token
            self._answer += text
        event = chunk.get("agent_event")
        if event is not None and event.get("agent") in self._progress:
            self._progress[event["agent"]].take(event)

    def __rich__(self) -> RenderableType:
        legend = "  ".join(f"{character} {state}" for state, (character, _) in LOOKS.items())
        right = Text(f"The right answer: {self._item.answer}", "dim")
        body = Group(self._graph(), Text(legend, "dim"), Text(), Text(self._answer or "...", "italic"), right)
        return Panel(body, title=f"{self._topology.name}: {self._item.question}", title_align="left")

    def _graph(self) -> Table:
        """A column per layer; an agent stands in the middle of the rows that a tree gives it."""
        layers = self._topology.layers
        rows = max(map(len, layers))
        grid = Table.grid(padding=(0, 3))
        columns = [_spread(layer, rows) for layer in layers]
        for row in range(rows):
            grid.add_row(*(self._cell(column[row]) for column in columns))
        return grid

    def _cell(self, agent: str | None) -> Text:
        if agent is None:
            return Text()
        progress = self._progress[agent]
        character, style = LOOKS[progress.state]
        model = self._topology.agents[agent].model_name
        tokens = "" if progress.tokens is None else f" {progress.tokens}"
        return Text.assemble((character, style), f" {agent} ", (model, "dim"), (tokens, style))


def _spread(layer: Sequence[str], rows: int) -> list[str | None]:
    """The layer's agents at even distances over `rows` cells."""
    cells: list[str | None] = [None] * rows
    for position, agent in enumerate(layer):
        cells[int((position + 0.5) * rows / len(layer))] = agent
    return cells
