"""Topology files with accidents: they are read, or refused with a line; nothing else happens."""

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shell_router.errors import TopologyError
from shell_router.topology import Topology
from shell_router.topology.load import parse_topology

SHIPPED = [file.read_text(encoding="utf-8") for file in sorted(Path("topologies").glob("*.yaml"))]
PIECES = [
    *(
        "[",
        "]",
        "{",
        "}",
        ":",
        ": ",
        "- ",
        "? ",
        "#",
        "&a ",
        "*a",
        "!x ",
        "!!int ",
        "|\n",
        ">-\n",
        "<<: ",
        "\n",
        "\t",
        "  ",
    ),
    *(
        "null",
        "-1",
        "0",
        "1e999",
        ".nan",
        "1:60",
        "2026-01-01",
        "'",
        '"',
        "%YAML 9\n",
        "---\n",
        "...\n",
        "\ufeff",
        "\x85",
    ),
    *(
        "{question}",
        "{output",
        "auto",
        "end",
        "steps:\n",
        "agents:\n",
        "tree: {shape: [9, 3, 1]}\n",
        "name: x\n",
    ),
]
accidents = st.lists(
    st.tuples(
        st.integers(0, 2000), st.integers(0, 40), st.sampled_from(PIECES) | st.text(max_size=4)
    ),
    max_size=5,
)


@given(st.sampled_from(SHIPPED), accidents)
def test_a_file_with_accidents_is_read_or_refused_with_a_line(
    text: str, edits: list[tuple[int, int, str]]
) -> None:
    for place, gone, put in edits:
        at = place % (len(text) + 1)
        text = text[:at] + put + text[at + gone :]
    try:
        assert isinstance(parse_topology(text, source="f.yaml"), Topology)
    except TopologyError as error:
        assert all(re.match(r"f\.yaml:[0-9]+: ", line) for line in str(error).splitlines())
