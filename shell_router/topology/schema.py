"""The JSON Schema that lets editors complete and check topology files."""

from typing import Any

from shell_router.topology.syntax import DEFINITIONS, GRAPH_FORMS, TOPOLOGY


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of a topology file: keys, kinds and bounds, but neither names nor the graph."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Shell router topology",
        **TOPOLOGY.definition(),
        "oneOf": [{"required": [form]} for form in GRAPH_FORMS],
        "$defs": {block.name: block.definition() for block in DEFINITIONS},
    }
