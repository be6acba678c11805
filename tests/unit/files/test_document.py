import pytest

from shell_router.errors import TopologyError
from shell_router.files.document import Problem, read_document


def test_values_come_with_their_lines() -> None:
    document = read_document("a: 1\nb:\n  - x\n  - {c: 2.5}\n\nd: |\n  text\n", source="f.yaml")
    assert document.value == {"a": 1, "b": ["x", {"c": 2.5}], "d": "text\n"}
    paths = ((), ("a",), ("b",), ("b", 1), ("b", 1, "c"), ("d",), ("d", "not there"))
    assert [document.line_of(path) for path in paths] == [1, 1, 2, 4, 4, 6, 6]


def test_an_alias_stands_for_what_it_names() -> None:
    assert read_document("a: &x {k: [1]}\nb: *x\n", source="f").value == {
        "a": {"k": [1]},
        "b": {"k": [1]},
    }


def test_problems_are_reported_once_each_in_the_order_of_lines() -> None:
    document = read_document("a: 1\nb: 2\n", source="f.yaml")
    late, early = Problem(("b",), "B.", "Mend b."), Problem(("a",), "A.", "Mend a.")
    with pytest.raises(TopologyError) as error:
        document.require_none([late, early, late])
    assert str(error.value) == "f.yaml:1: A. Mend a.\nf.yaml:2: B. Mend b."


def test_a_single_problem_keeps_its_remedy_apart() -> None:
    with pytest.raises(TopologyError) as error:
        read_document("a: 1", source="f.yaml").require_none([Problem(("a",), "Wrong.", "Mend it.")])
    assert error.value.args[0] == "f.yaml:1: Wrong."
    assert error.value.remedy == "Mend it."


def test_a_document_without_problems_is_not_refused() -> None:
    read_document("a: 1", source="f.yaml").require_none([])


_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]" for n in range(1, 12)]
)

UNREADABLE = {
    "empty": ("", 1, "empty"),
    "only a comment": ("# nothing\n", 1, "empty"),
    "unclosed list": ("a:\n  [1,\n", 3, "Not valid YAML"),
    "tab indentation": ("a:\n\tb: 1\n", 2, "Not valid YAML"),
    "control character": ("a: 1\nb: \x07\n", 2, "character"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "Not valid YAML"),
    "undefined alias": ("a: 1\nb: *missing\n", 2, "undefined alias"),
    "same key twice": ("a: 1\nb: 2\na: 3\n", 3, "'a' is used twice; first in line 1"),
    "key that is not text": ("a: 1\n2: b\n", 2, "key 2 is not text"),
    "key read as a switch": ("off: b\n", 1, "key off is not text"),
    "merge key": ("a: &a {b: 1}\nc:\n  <<: *a\n", 3, "Merge keys"),
    "key that is a list": ("? [a]\n: b\n", 1, "not text"),
    "date": ("a: 2026-01-01\n", 1, "YAML timestamp"),
    "wrong tag": ("a: !!int x\n", 1, "YAML int"),
    "tag of a mapping": ("a: 1\nb: !mine {c: 1}\n", 2, "YAML !mine"),
    "tag of a mapping as text": ("a: !!str {c: 1}\n", 1, "YAML str"),
    "tag that would run code": ("a: !!python/object/apply:os.system [x]\n", 1, "YAML os.system"),
    "number beyond all limits": ("a: 1" + "0" * 5000, 1, "YAML int"),
    "alias bomb": (_BOMB, 1, "too many"),
    "alias of itself": ("a: &a [*a]\n", 1, "nested too deeply"),
    "depth within YAML": ("[" * 5000, 1, "nested too deeply"),
    "depth that takes PyYAML minutes": ("a: " + "[" * 3000 + "]" * 3000, 1, "nested too deeply"),
    "lists in lists": ("- " * 3000, 1, "nested too deeply"),
    "values without end": ("a: [" + "b," * 60_000 + "]", 1, "too many"),
    "a number that takes minutes": ("a: " + "1:" * 100_000 + "1", 1, "YAML int"),
    "depth within limits of YAML": ("[" * 80 + "]" * 80, 1, "nested too deeply"),
    "size": ("a: " + "x" * 1_000_001, 1, "characters"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_refused_with_its_line(case: str) -> None:
    text, line, message = UNREADABLE[case]
    with pytest.raises(TopologyError, match=message) as error:
        read_document(text, source="f.yaml")
    assert str(error.value).startswith(f"f.yaml:{line}: ")
    assert error.value.remedy


def test_variables_stand_for_text_or_plain_ones_for_numbers_and_switches() -> None:
    text = "\n".join(
        (
            "url: http://${HOST}:${PORT}/x",
            "port: ${PORT}",
            "quoted: '${PORT}'",
            "flags: [&alias '${HOST}', *alias]",
            "flag: ${FLAG}",
            "empty: '${NONE}'",
            "${HOST}: $HOST ${} $(HOST)",
        )
    )
    environ = {"HOST": "h", "PORT": "80", "FLAG": "on", "NONE": ""}
    assert read_document(text, source="f.yaml", environ=environ).value == {
        "url": "http://h:80/x",
        "port": 80,
        "quoted": "80",
        "flags": ["h", "h"],
        "flag": True,
        "empty": "",
        "${HOST}": "$HOST ${} $(HOST)",
    }


def test_variables_that_are_not_set_are_named_with_their_lines() -> None:
    text = "a: ${ONE}\nb:\n  - ${TWO}${ONE}\n"
    with pytest.raises(TopologyError) as error:
        read_document(text, source="f.yaml", environ={"TWO": "2"})
    assert str(error.value).split("\n") == [
        "f.yaml:1: The environment variable ONE is not set. Set it.",
        "f.yaml:3: The environment variable ONE is not set. Set it.",
    ]


def test_documents_of_clients_and_topologies_get_no_variables() -> None:
    assert read_document("a: ${PATH}", source="f.yaml").value == {"a": "${PATH}"}
