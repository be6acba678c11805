"""Write the generated parts of the reference pages: `python docs/generate.py`; with `--check`, only
compare.

A generated part stands between `<!-- generated: KIND ARGUMENT -->` and `<!-- end -->`. Names, types
and defaults come from the code, and so do the meanings of settings that describe themselves. Other
meanings are written on the page.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

PAGES = Path(__file__).parent
ROOT = PAGES.parent
sys.path.insert(0, str(ROOT))
from shell_router.app.wings import kind_settings  # noqa: E402
from shell_router.config import Config  # noqa: E402
from shell_router.config.read import file_fields, takes_kinds  # noqa: E402
from shell_router.lab.simulation.settings import Length  # noqa: E402

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
    if missing := {setting.name for setting in file_fields(Config)} - shown:
        raise LookupError(
            f"add a generated part with the settings {', '.join(sorted(missing))} to a page in "
            "docs/"
        )
    return stale


def _part(found: re.Match[str]) -> str:
    head, kind, argument, old, end = found.groups()
    return head + KINDS[kind](argument or "", old) + end


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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


# settings MODULE:CLASS [SECTION ...]: every setting of a dataclass, its sections' included.
# Sections that are a deployment's own stand in other files as one row


def _settings(argument: str, old: str) -> str:
    where, *sections = argument.split()
    module, _, name = where.partition(":")
    kind = getattr(import_module(module), name)
    kept = _kept(old)
    abouts = dict(_abouts(kind))
    rows = []
    for path, setting in _of_class(
        kind, "", () if kind is Config else (*_sections(Config), *_kinds(), Length)
    ):
        if sections and path.split(".")[0] not in sections:
            continue
        default = _default(setting)
        before = kept.get(f"`{path}`", ["", MISSING_MEANING])
        meaning = _cell(abouts.get(path, "")) or before[-1]
        rows.append((f"`{path}`", default if default is not None else before[0] or "none", meaning))
    return _table(("Setting", "Default", "Meaning"), rows)


def _abouts(kind: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """The path of every setting, and what its annotation says of it."""
    for name, hint in (
        (each.name, get_type_hints(kind, include_extras=True)[each.name])
        for each in file_fields(kind)
    ):
        if takes_kinds(hint):
            for engine, load in kind_settings().items():
                yield above + engine, (load().__doc__ or "").strip().partition("\n")[0]
                yield from _abouts(load(), f"{above}{engine}.")
            continue
        note = (
            get_args(hint)[1] if get_origin(hint) is Annotated else ""
        )  # a section's class says what the section is
        yield above + name, note if isinstance(note, str) else str(getattr(note, "about", ""))
        for section in (
            part for part in _parts(hint) if is_dataclass(part) and isinstance(part, type)
        ):
            yield from _abouts(section, f"{above}{name}{_entry(hint)}.")


def _kinds() -> Iterator[Any]:
    """The sections of engine kinds."""
    return (load() for load in kind_settings().values())


def _sections(kind: Any) -> Iterator[Any]:
    """The dataclasses that a dataclass holds, at any depth."""
    for section in (
        part
        for hint in get_type_hints(kind).values()
        for part in _parts(hint)
        if is_dataclass(part)
    ):
        yield section
        yield from _sections(section)


def _of_class(
    kind: Any, path: str, above: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Field[Any]]]:
    hints = get_type_hints(kind)
    described = get_type_hints(kind, include_extras=True)
    for setting in file_fields(kind):
        if takes_kinds(described[setting.name]):
            for name, load in kind_settings().items():
                yield f"{path}.{name}".lstrip("."), setting
                yield from _of_class(load(), f"{path}.{name}".lstrip("."), above)
            continue
        here = f"{path}.{setting.name}".lstrip(".")
        inner = [
            part for part in _parts(hints[setting.name]) if is_dataclass(part) and part not in above
        ]
        if not inner or _may_be_absent(setting):
            yield here, setting
        for section in inner:
            entry = here + _entry(hints[setting.name])
            yield from _of_class(section, entry, (*above, section))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _entry(hint: Any) -> str:
    """What stands between a setting of this type and the settings of its entries."""
    origins = [getattr(part, "__origin__", None) for part in _parts(hint)]
    if Mapping in origins or dict in origins:
        return ".<name>"
    return "[]" if tuple in origins else ""


def _may_be_absent(setting: Field[Any]) -> bool:
    return setting.default is None or setting.default == ()


def _default(setting: Field[Any]) -> str | None:
    """The default as YAML has it; None where the page says it in words."""
    value = setting.default
    if value is MISSING and setting.default_factory is MISSING:
        return "required"
    if value is MISSING or value is None or value in ((), ""):
        return None
    if is_dataclass(value):
        given = {one.name: getattr(value, one.name) for one in fields(value)}
        return f"`{{{', '.join(f'{name}: {one}' for name, one in given.items() if one)}}}`"
    if isinstance(value, bool):
        return "`on`" if value else "`off`"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value)
        if isinstance(value, int)
        else f"`{value}`"
    )


# metrics: every metric of the registry, with its help


def _metrics(_: str, __: str) -> str:
    from shell_router.engines.metrics import EngineMetrics  # noqa: PLC0415
    from shell_router.swapping.leases import ModelLeases  # noqa: PLC0415
    from shell_router.swapping.metrics import TurnMetrics  # noqa: PLC0415
    from shell_router.telemetry import Metrics  # noqa: PLC0415

    registry, rows = Metrics().registry, []
    registry.register(EngineMetrics({}))
    nothing: Any = None
    leases = ModelLeases(nothing, nothing, nothing, places=1, window_s=1, wait_s=1, order=nothing)
    registry.register(TurnMetrics(leases))
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            named = getattr(family, "_labelnames", labels) or labels
            rows.append((f"`{name}`", family.type, ", ".join(named), _cell(family.documentation)))
    return _table(("Metric", "Type", "Labels", "Meaning"), rows)


# routes, events, errors: the HTTP API's tables


def _routes(_: str, old: str) -> str:
    from shell_router.api.app import ROUTES  # noqa: PLC0415
    from shell_router.api.views import PAGE_ROUTE  # noqa: PLC0415
    from shell_router.batch.api.routes import ROUTES as BATCH_ROUTES  # noqa: PLC0415

    names = [f"`{route.method} {route.path}`" for route in (*ROUTES, PAGE_ROUTE, *BATCH_ROUTES)]
    return _table(("Route", "What it does"), _with_meaning([(name,) for name in names], old))


def _events(_: str, old: str) -> str:
    from shell_router.api.frames import KINDS as EVENTS  # noqa: PLC0415

    rows = [
        (
            f"`agent.{name}`",
            ", ".join(f"`{fact.name}`" for fact in fields(event) if fact.name != "at_s"),
        )
        for event, name in EVENTS.items()
    ]
    return _table(("Event", "Facts", "When"), _with_meaning(rows, old))


def _errors(_: str, old: str) -> str:
    from shell_router.api.replies import INTERNAL, PROBLEMS, REJECTED_BY_ENGINE  # noqa: PLC0415

    problems = {
        problem.code: problem for problem in (*PROBLEMS.values(), REJECTED_BY_ENGINE, INTERNAL)
    }
    rows = [
        (f"`{code}`", str(found.status), found.type)
        for code, found in sorted(problems.items(), key=lambda item: (item[1].status, item[0]))
    ]
    return _table(("Code", "Status", "Type", "When"), _with_meaning(rows, old))


# topology [DEFINITION]: the keys of a topology file, from its JSON Schema


def _topology(argument: str, _: str) -> str:
    from shell_router.topology import json_schema  # noqa: PLC0415

    schema = json_schema()
    block = schema["$defs"].get(argument) or schema["properties"].get(argument, schema)
    rows = [
        (f"`{key}`", _own_section(key, form) or _form(form, schema), _cell(_about(form, schema)))
        for key, form in block["properties"].items()
    ]
    return _table(("Key", "Value", "Meaning"), rows)


def _own_section(key: str, form: dict[str, Any]) -> str:
    """A link to the section of a key whose value has keys of its own; `all_to_all` has those of
    `tree`.
    """
    name = "tree" if key == "all_to_all" else key
    return f"[{name}](#{name})" if "properties" in form else ""


def _about(form: dict[str, Any], schema: dict[str, Any]) -> str:
    own = str(form.get("description", ""))
    return own or (_about(_target(form, schema), schema) if "$ref" in form else "")


def _target(form: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][form["$ref"].rpartition("/")[2]]
    return found


def _form(form: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in form:
        name = form["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in form:
        return " or ".join(dict.fromkeys(_form(one, schema) for one in form["anyOf"]))
    if "enum" in form:
        words = [str(one) for one in form["enum"] if not isinstance(one, bool)]
        return ", ".join(f"`{word}`" for word in words)
    kind = str(form.get("type", "any"))
    if kind == "array":
        return f"list of {_form(form['items'], schema)}"
    if kind == "object" and isinstance(form.get("additionalProperties"), dict):
        return f"mapping to {_form(form['additionalProperties'], schema)}"
    return kind + _bounds(form)


def _bounds(form: dict[str, Any]) -> str:
    said = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    found = [f"{words} {form[key]}" for key, words in said.items() if key in form]
    return f", {', '.join(found)}" if found else ""


# cli: every command with its options


def _cli(_: str, __: str) -> str:
    from typer.main import get_command  # noqa: PLC0415

    from shell_router.cli import app  # noqa: PLC0415

    return "\n".join(_commands(get_command(app), "shell-router"))


def _commands(group: Any, name: str) -> Iterator[str]:
    for inner, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {inner}")
        else:
            rows = [(f"`{_spelled(one)}`", _cell(_meaning(one))) for one in command.params]
            examples = "\n".join(line.strip() for line in (command.epilog or "").splitlines()[2:])
            example = f"\n```bash\n{examples}\n```\n" if examples else ""
            table = _table(("Argument", "Meaning"), rows) if rows else ""
            about = " ".join(command.help.split())
            yield f"## {name} {inner}\n\n{about}\n\n" + table + example


def _spelled(parameter: Any) -> str:
    metavar = parameter.metavar or ""
    return (
        metavar
        if parameter.param_type_name == "argument"
        else f"{parameter.opts[0]} {metavar}".strip()
    )


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
