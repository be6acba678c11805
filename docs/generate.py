"""Write the generated parts of the reference pages: `python docs/generate.py`; with `--check`, only
compare.

A generated part stands between `<!-- generated: KIND ARGUMENT -->` and `<!-- end -->`. Names, types
and defaults come from the code, and so do the meanings of settings that describe themselves. Other
meanings are written on the page.
"""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

PAGES = Path(__file__).parent
ROOT = PAGES.parent
sys.path.insert(0, str(ROOT))
from shell_router.app.wings import kind_settings  # noqa: E402
from shell_router.config import Config, deployment_schema  # noqa: E402
from shell_router.files.schema import Schema, bounds, json_schema, options, resolve  # noqa: E402
from shell_router.lab.simulation.settings import Length  # noqa: E402
from shell_router.standins.embedded.settings import EmbeddedSection  # noqa: E402
from shell_router.topology import topology_schema  # noqa: E402

PART = re.compile(r"(<!-- generated: (\S+)(?: ([^\n]*?))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MISSING_MEANING = "TODO: say what it means."


def stale_pages(*, write: bool) -> list[str]:
    """The pages whose generated parts differ from the code, or lack a meaning; with `write` they
    are written anew.

    Raises LookupError where no page has a deployment's setting.
    """
    stale, shown = [], set[str]()
    for page in sorted(PAGES.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        current = PART.sub(_part, text)
        if current != text or MISSING_MEANING in current:
            stale.append(str(page.relative_to(ROOT)))
        if write and current != text:
            page.write_text(current, encoding="utf-8")
        for names in re.findall(
            r"<!-- generated: settings shell_router.config:Config (.*) -->", text
        ):
            shown.update(names.split())
    if missing := deployment_schema(kind_settings())["properties"].keys() - shown:
        raise LookupError(
            f"add a generated part with the settings {', '.join(sorted(missing))} to a page in "
            "docs/"
        )
    return stale


def _part(found: re.Match[str]) -> str:
    head, kind, argument, old, end = found.groups()
    return head + KINDS[kind](argument or "", old) + end


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head, *lines = [f"| {' | '.join(line)} |\n" for line in (heads, *rows)]
    return "".join((head, f"|{'---|' * len(heads)}\n", *lines))


def _with_meaning(rows: list[tuple[str, ...]], old: str) -> list[tuple[str, ...]]:
    """Each row with its last cell of an older table."""
    kept = _kept(old)
    return [(*row, kept.get(row[0], [MISSING_MEANING])[-1]) for row in rows]


def _kept(old: str) -> dict[str, list[str]]:
    """The cells behind the first one of each row of an older table, by the first cell."""
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1] for line in old.splitlines() if line.startswith("| `")
    ]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\|", " ".join(text.split()))


# settings MODULE:CLASS [SECTION ...] [-PATH]: every setting of a class, its sections' included,
# but for those below PATH.
# Sections that are a deployment's own stand in other files as one row


def _settings(argument: str, old: str) -> str:
    where, *sections = argument.split()
    module, _, name = where.partition(":")
    kind = getattr(import_module(module), name)
    deployment = deployment_schema(kind_settings())
    if kind is Config:
        schema = deployment
        elsewhere = set[str]()
    else:
        schema = json_schema(kind, name)
        elsewhere = {*deployment["$defs"], EmbeddedSection.__name__, Length.__name__}
    kept = _kept(old)
    rows = []
    hidden = tuple(section[1:] for section in sections if section.startswith("-"))
    shown = [section for section in sections if not section.startswith("-")]
    for path, form, is_required in _rows_of(schema, schema, "", elsewhere):
        if hidden and path.startswith(hidden):
            continue
        if not shown or path.split(".")[0] in shown:
            before = kept.get(f"`{path}`", ["", _about(form, schema) or MISSING_MEANING])
            default = "required" if is_required else _default(form) or before[0]
            meaning = _cell(form.get("description", "")) or before[-1]
            rows.append((f"`{path}`", default, meaning))
    return _table(("Setting", "Default", "Meaning"), rows)


def _rows_of(
    schema: Schema, block: Schema, path: str, elsewhere: set[str]
) -> Iterator[tuple[str, Schema, bool]]:
    """Yield the path of every setting, its form, and whether it is required."""
    for key, form in block["properties"].items():
        here = f"{path}.{key}".lstrip(".")
        sections = [each for each in _sections_in(schema, form) if each[1] not in elsewhere]
        if not sections or form.get("default", ...) in (None, []):
            yield here, form, key in block.get("required", ())
        for entry, name, section in sections:
            yield from _rows_of(schema, section, here + entry, {*elsewhere, name})


def _sections_in(schema: Schema, form: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Yield the sections that a value holds: their place in it, their names and their forms."""
    name = form.get("$ref", "").rpartition("/")[2]
    form = resolve(schema, form)
    if "properties" in form:
        yield "", name, form
    for inner in form.get("anyOf", ()):
        yield from _sections_in(schema, inner)
    entries = form.get("additionalProperties")
    for place, inner in (("[]", form.get("items")), (".<name>", entries)):
        if isinstance(inner, dict):
            yield from ((place + entry, *rest) for entry, *rest in _sections_in(schema, inner))


def _default(form: Schema) -> str:
    """Return the default as YAML has it; empty where the page says it in words."""
    value = form.get("default")
    if value in (None, [], "", {}):
        return ""
    if isinstance(value, dict):
        return f"`{{{', '.join(f'{name}: {item}' for name, item in value.items() if item)}}}`"
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int) else f"`{value}`"


# metrics: every metric of the registry, with its help


def _metrics(_: str, __: str) -> str:
    from shell_router.engines.metrics import EngineMetrics  # noqa: PLC0415
    from shell_router.swapping.leases import ModelLeases  # noqa: PLC0415
    from shell_router.swapping.metrics import TurnMetrics  # noqa: PLC0415
    from shell_router.telemetry import Metrics  # noqa: PLC0415

    registry = Metrics().registry
    rows = []
    histograms = []
    registry.register(EngineMetrics({}))
    nothing: Any = None
    leases = ModelLeases(nothing, nothing, nothing, places=1, window_s=1, wait_s=1, order=nothing)
    registry.register(TurnMetrics(leases))
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            named = getattr(family, "_labelnames", labels) or labels
            rows.append((f"`{name}`", ", ".join(named), _cell(family.documentation)))
            if family.type == "histogram":
                histograms.append(f"`{name}`")
    table = _table(("Metric", "Labels", "Meaning"), rows)
    return f"{table}\nHistograms: {', '.join(histograms)}.\n"


# routes, events, errors: the HTTP API's tables


def _routes(_: str, old: str) -> str:
    from shell_router.api.app import ROUTES  # noqa: PLC0415
    from shell_router.api.views import PAGE_ROUTES  # noqa: PLC0415
    from shell_router.batch.api.routes import ROUTES as BATCH_ROUTES  # noqa: PLC0415

    names = [f"`{route.method} {route.path}`" for route in (*ROUTES, *PAGE_ROUTES, *BATCH_ROUTES)]
    return _table(("Route", "What it does"), _with_meaning([(name,) for name in names], old))


def _events(_: str, old: str) -> str:
    from shell_router.api.frames import KINDS as EVENTS  # noqa: PLC0415

    rows = [
        (
            f"`agent.{name}`",
            ", ".join(
                f"`{fact.name}`" for fact in fields(event) if fact.compare and fact.name != "at_s"
            ),
        )
        for event, name in EVENTS.items()
    ]
    return _table(("Event", "Facts", "When"), _with_meaning(rows, old))


def _errors(_: str, old: str) -> str:
    from shell_router.api.replies import INTERNAL, PROBLEMS, REJECTED_BY_ENGINE  # noqa: PLC0415

    problems = {
        problem.code: problem for problem in (*PROBLEMS.values(), REJECTED_BY_ENGINE, INTERNAL)
    }
    parts = []
    for kind in dict.fromkeys(problem.type for problem in problems.values()):
        rows = [
            (f"`{code}`", str(problem.status))
            for code, problem in sorted(
                problems.items(), key=lambda item: (item[1].status, item[0])
            )
            if problem.type == kind
        ]
        table = _table(("Code", "Status", "When"), _with_meaning(rows, old))
        parts.append(f"`type` is `{kind}`:\n\n{table}")
    return "\n".join(parts)


# topology [DEFINITION [without DEFINITION]]: the keys of a topology file, from its JSON Schema;
# without those of another definition, which the page names


def _topology(argument: str, _: str) -> str:
    schema = topology_schema()
    definition, _, other = argument.partition(" without ")
    block = schema["$defs"].get(definition, schema)
    elsewhere = schema["$defs"].get(other, {}).get("properties", {})
    rows = [
        (f"`{key}`", _form(form, schema), _cell(_about(form, schema)))
        for key, form in block["properties"].items()
        if _about(form, schema) != _about(elsewhere.get(key, {}), schema)
    ]
    return _table(("Key", "Value", "Meaning"), rows)


def _about(form: Schema, schema: Schema) -> str:
    return str(resolve(schema, form).get("description", ""))


def _form(form: Schema, schema: Schema) -> str:
    if "$ref" in form:
        name = form["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in form:
        inner = [one for one in form["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(_form(one, schema) for one in inner))
    if words := options(form):
        return ", ".join(f"`{word}`" for word in words if not isinstance(word, bool))
    kind = str(form.get("type", "any"))
    if kind == "array":
        return f"list of {_form(form['items'], schema)}"
    entries = form.get("additionalProperties")
    if kind == "object":
        return f"mapping to {_form(entries, schema) if isinstance(entries, dict) else 'any'}"
    return ", ".join([kind, *bounds(form)])


# cli: every command with its options


def _cli(_: str, __: str) -> str:
    from typer.main import get_command  # noqa: PLC0415

    from shell_router.cli import app  # noqa: PLC0415

    return "\n".join(_commands(get_command(app), "shell-router", {}))


def _commands(group: Any, name: str, earlier: dict[str, list[tuple[str, ...]]]) -> Iterator[str]:
    for inner, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {inner}", earlier)
        else:
            rows = [(f"`{_spelled(one)}`", _cell(_meaning(one))) for one in command.params]
            examples = "\n".join(line.strip() for line in (command.epilog or "").splitlines()[2:])
            example = f"\n```bash\n{examples}\n```\n" if examples else ""
            about = " ".join(command.help.split())
            table = _arguments(rows, earlier)
            earlier[f"{name} {inner}"] = rows
            yield f"## {name} {inner}\n\n{about}\n\n" + table + example


MANY_SHARED = 3


def _arguments(rows: list[tuple[str, ...]], earlier: dict[str, list[tuple[str, ...]]]) -> str:
    """Return a table of a command's arguments; many that another command has are only named."""
    for command, others in earlier.items():
        shared = [argument for argument, meaning in rows if (argument, meaning) in others]
        if len(shared) >= MANY_SHARED:
            own = [row for row in rows if row[0] not in shared]
            names = ", ".join(shared)
            return _table(("Argument", "Meaning"), own) + f"\nAs for `{command}`: {names}.\n"
    return _table(("Argument", "Meaning"), rows) if rows else ""


def _spelled(parameter: Any) -> str:
    metavar = parameter.metavar or ""
    return (
        metavar
        if parameter.param_type_name == "argument"
        else f"{parameter.opts[0]} {metavar}".strip()
    )


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _meaning(parameter: Any) -> str:
    default = parameter.default
    parts = [
        part for part in _parts(parameter.type_descriptor.annotation) if get_origin(part) is Literal
    ]
    choices = ", ".join(f"`{choice}`" for part in parts for choice in get_args(part))
    about = f"{parameter.help or ''} One of {choices}." if choices else parameter.help or ""
    if parameter.required or default is None or default is False or default == ():
        return about + (" Required." if parameter.required else "")
    return (
        f"{about} Default: "
        f"{','.join(map(str, default)) if isinstance(default, tuple) else default}."
    )


KINDS: dict[str, Callable[[str, str], str]] = {
    "settings": _settings,
    "metrics": _metrics,
    "routes": _routes,
    "events": _events,
    "errors": _errors,
    "topology": _topology,
    "cli": _cli,
}

if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    found = stale_pages(write=not check)
    for page in found:
        print(f"{page}: {'run `python docs/generate.py`' if check else 'written'}")
    sys.exit(bool(check and found))
