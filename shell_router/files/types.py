"""Types of settings, for the annotations of classes that describe files.

The first text of an annotation is the setting's description: `Annotated[Count, "Lines that run."]`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval
from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, PydanticOmit, core_schema
from yarl import URL

from shell_router.errors import SettingError

Count = Annotated[int, Ge(1)]
"""A whole number from 1."""
Index = Annotated[int, Ge(0)]
"""A whole number from 0."""
Positive = Annotated[float, Gt(0)]
Seconds = Positive
Amount = Annotated[float, Ge(0)]
"""A number that may be 0: a cost, a weight, a wait."""
Share = Annotated[float, Interval(ge=0, le=1)]


def _check_url(url: str) -> str:
    """Refuse a URL that no request can be sent to, without showing its password."""
    try:
        address = URL(url)
        usable = address.port != 0 and _HOST.fullmatch(address.host or "")
    except ValueError:
        usable = None
    if not usable:
        raise SettingError(
            f"{url.rpartition('@')[2]!r} names no host and port that can be reached",
            remedy="Write http://HOST:PORT, a port of at most 65535, and an IPv6 address in [ ].",
        )
    return url


_HOST = re.compile(r"[\w.:%-]+")
Url = Annotated[
    str,
    Field(pattern=r"^https?://.+$", title="an http(s) URL"),
    AfterValidator(_check_url),
]
Origin = Annotated[
    str,
    Field(pattern=r"^([a-z][a-z0-9+.-]*://[^/]+|\*)$", title="an origin without a path, or '*'"),
]
"""A web page's scheme, host and port."""

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
Name = Annotated[
    str,
    Field(pattern=f"^{NAME_PATTERN}$", title="a name of letters a to z, digits, '.', '_' and '-'"),
]
"""The name of an agent, a cluster, a step."""
ModelName = Annotated[
    str,
    Field(
        pattern=f"^{NAME_PATTERN.replace('_-', '_/-')}$",
        title="a name of letters a to z, digits, '.', '_', '-' and '/'",
    ),
]
"""A name that requests ask for, as those of models on hubs: `Qwen/Qwen3-8B`."""

SECRET = Field(json_schema_extra={"writeOnly": True})
"""Annotates a value that error messages must not show."""


def _read_switch(value: object) -> object:
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


Switch = Annotated[bool, BeforeValidator(_read_switch)]
"""On or off. YAML 1.1 reads bare `on` as true; JSON and YAML 1.2 have it as text."""


def _read_path(path: Path, info: ValidationInfo) -> Path:
    folder: Path = info.context["folder"] if info.context else Path()
    return folder / path.expanduser()


FilePath = Annotated[Path, AfterValidator(_read_path)]
"""A path; a relative one counts from the folder of the file that names it."""


def _require_distinct(items: Any) -> Any:
    seen = set[Any]()
    for item in items:
        if item in seen:
            raise SettingError(f"it names {item!r} twice", remedy="Name it once.")
        seen.add(item)
    return items


DISTINCT = AfterValidator(_require_distinct)
"""Annotates a list that names nothing twice."""


@dataclass(frozen=True, eq=False)
class OneOf:
    """Annotates a text that is one of a table's keys."""

    table: Iterable[str]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Accept the keys and nothing else."""
        return core_schema.literal_schema(list(self.table))


class CodeOnly:
    """Annotates a field that code may set and files may not: a constant of an algorithm."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Refuse the field as an unknown key."""

        def refuse(value: object) -> object:
            raise PydanticCustomError("extra_forbidden", "not for files")

        return core_schema.no_info_plain_validator_function(refuse)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> Mapping[str, Any]:
        """Leave the field out of the JSON Schema."""
        raise PydanticOmit


CODE_ONLY = CodeOnly()
