"""The forms of names in topology files."""

from shell_router.topology.grammar import Text

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAME_NOUN = "a name of letters, digits, '.', '_' and '-'"


def name_form(about: str) -> Text:
    """A name that a file gives: a topology's, an agent's, a cluster's, a step's."""
    return Text(about, NAME_PATTERN, NAME_NOUN)
