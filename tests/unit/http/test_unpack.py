"""Packed bodies, whole and broken."""

import gzip
import zlib

import pytest

from shell_router.http.app import BodyTooLarge, UnreadableBody
from shell_router.http.server import unpack

CONTENT = bytes(range(256)) * 64


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_packed_body_is_taken_only_as_a_whole(coding: str, pack: type[bytes]) -> None:
    packed = pack(CONTENT)
    assert unpack(packed, coding, len(CONTENT)) == CONTENT
    for broken in (packed[:-1], packed[: len(packed) // 2], packed + packed, b""):
        with pytest.raises(UnreadableBody):
            unpack(broken, coding, len(CONTENT))
    with pytest.raises(BodyTooLarge):
        unpack(packed, coding, len(CONTENT) - 1)
