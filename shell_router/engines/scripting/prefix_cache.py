"""An honest stand-in for a prefix cache: it knows which prompts were prefilled, and holds no KV."""

from array import array
from collections import OrderedDict

_TOKEN_BYTES = 8
_KEY_TOKENS = 8


def pack(ids: list[int]) -> bytes:
    """Token ids as bytes, so that prefixes compare at memory speed; raises TypeError for what is no id."""
    return array("q", ids).tobytes()


class PrefixCache:
    """The prompts last prefilled, at most `capacity`. Those that differ in their first 8 tokens share nothing."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._prompts: OrderedDict[bytes, None] = OrderedDict()
        self._by_key: dict[bytes, list[bytes]] = {}

    def cached_tokens(self, prompt: bytes) -> int:
        """Leading tokens of the packed `prompt` that are cached; its last token is always computed again."""
        known = self._by_key.get(prompt[: _KEY_TOKENS * _TOKEN_BYTES], ())
        longest = max((_common_bytes(prompt, one) for one in known), default=0)
        return max(0, min(longest, len(prompt) - _TOKEN_BYTES)) // _TOKEN_BYTES

    def insert(self, prompt: bytes) -> None:
        """Remember a packed prompt; one that it extends is forgotten, as nothing is lost with it."""
        key = prompt[: _KEY_TOKENS * _TOKEN_BYTES]
        for known in [one for one in self._by_key.get(key, ()) if prompt.startswith(one)]:
            self._forget(known)
        self._prompts[prompt] = None
        self._by_key.setdefault(key, []).append(prompt)
        if len(self._prompts) > self._capacity:
            self._forget(next(iter(self._prompts)))

    def _forget(self, prompt: bytes) -> None:
        del self._prompts[prompt]
        key = prompt[: _KEY_TOKENS * _TOKEN_BYTES]
        self._by_key[key].remove(prompt)
        if not self._by_key[key]:
            del self._by_key[key]


def _common_bytes(left: bytes, right: bytes) -> int:
    """Length of the common prefix, by bisection over memory comparisons."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
