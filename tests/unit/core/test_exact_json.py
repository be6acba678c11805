"""JSON with integers that orjson refuses."""

import orjson
import pytest

from shell_router.core.exact_json import write_json


@pytest.mark.parametrize("number", [1, 2**70])
def test_keys_are_sorted_whatever_numbers_there_are(number: int) -> None:
    one = write_json({"b": number, "a": [{"d": 1, "c": 2}]}, orjson.OPT_SORT_KEYS)
    other = write_json({"a": [{"c": 2, "d": 1}], "b": number}, orjson.OPT_SORT_KEYS)
    assert one == other
