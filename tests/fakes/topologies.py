"""Topologies with steps from text, as tests want them."""

from collections.abc import Collection, Mapping

from shell_router.files.document import read_document
from shell_router.topology import Conditional, Topology
from shell_router.topology.load import check_keys, link


def parse_steps(
    text: str,
    *,
    source: str,
    topologies: Mapping[str, Topology] | None = None,
    models: Collection[str] | None = None,
) -> Conditional:
    """The topology with steps that `text` describes, which may name some of `topologies`. Raises
    TopologyError.
    """
    document = check_keys(read_document(text, source=source))
    graph = link(document, models, graphs=topologies or {})
    assert isinstance(graph, Conditional)
    return graph
