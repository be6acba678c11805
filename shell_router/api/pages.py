"""Lists a page at a time, as OpenAI's clients ask for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from shell_router.api.batch.records import BatchRecord, FileRecord
from shell_router.errors import InvalidField


def page(
    records: Sequence[FileRecord | BatchRecord], query: Mapping[str, str], *, default: int, most: int
) -> dict[str, Any]:
    """The `limit` records that come after the one named by `after`. Raises InvalidField."""
    start = _place_after(records, query["after"]) if "after" in query else 0
    limit = _limit(query.get("limit", str(default)), most)
    told = [record.as_told() for record in records[start : start + limit]]
    return {
        "object": "list",
        "data": told,
        "first_id": told[0]["id"] if told else None,
        "last_id": told[-1]["id"] if told else None,
        "has_more": start + limit < len(records),
    }


def _place_after(records: Sequence[FileRecord | BatchRecord], id: str) -> int:
    for place, record in enumerate(records):
        if record.id == id:
            return place + 1
    raise InvalidField("after names nothing in this list.", field="after", remedy="Take the last_id of a page.")


def _limit(given: str, most: int) -> int:
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise InvalidField(f"limit must be a whole number from 1 to {most}.", field="limit")
    return int(given)
