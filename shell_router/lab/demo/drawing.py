"""A running request drawn as a graph, with its streamed answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shell_router.lab.evaluation.dataset import Item
from shell_router.topology import Topology

State = Literal["waiting", "prefilling", "decoding", "finished", "skipped", "cut off", "failed"]

LOOKS: Mapping[State, tuple[str, str]] = {
    "waiting": ("·", "dim"),
    "prefilling": ("▒", "cyan"),
    "decoding": ("█", "bright_green"),
    "finished": ("✓", "green"),
    "skipped": ("»", "green"),
    "cut off": ("✂", "red"),
    "failed": ("✗", "bold red"),
}
"""Per state its character and colour."""
ENDED: Mapping[str, State] = {"agent.skipped": "skipped", "agent.stopped": "cut off", "agent.failed": "failed"}


@dataclass(slots=True)
class Progress:
    """One agent so far, in tokens."""

    state: State = "waiting"
    prefilled: int = 0
    decoded: int = 0

    @property
    def tokens(self) -> int | None:
        """The count that describes the state best."""
        counts = {"prefilling": self.prefilled, "decoding": self.decoded, "finished": self.decoded}
        return counts.get(self.state)

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in one `agent_event` of this agent."""
        match event["type"]:
            case "agent.prefill" | "agent.ready":
                self.state, self.prefilled = "prefilling", event["prompt_tokens"]
            case "agent.tokens":
                self.state, self.decoded = "decoding", self.decoded + event["tokens"]
            case "agent.finished":
                self.state, self.decoded = "finished", event["completion_tokens"]
            case "agent.skipped" | "agent.stopped" | "agent.failed" as ended:
                self.state = ENDED[ended]


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
        cells = [[Text()] * len(layers) for _ in range(rows)]
        for column, layer in enumerate(layers):
            for position, agent in enumerate(layer):
                cells[int((position + 0.5) * rows / len(layer))][column] = self._cell(agent)
        for row in cells:
            grid.add_row(*row)
        return grid

    def _cell(self, agent: str) -> Text:
        progress = self._progress[agent]
        character, style = LOOKS[progress.state]
        model = self._topology.agents[agent].model_name
        tokens = "" if progress.tokens is None else f" {progress.tokens}"
        return Text.assemble((character, style), f" {agent} ", (model, "dim"), (tokens, style))


def delta(chunk: Mapping[str, Any]) -> str:
    """The root's text in a chunk; empty where it has none."""
    return str(chunk["choices"][0]["delta"].get("content") or "") if chunk.get("choices") else ""
