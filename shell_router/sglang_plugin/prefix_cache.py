"""Prefill-only requests: how SGLang's processes tell them from all others, and their way into the radix cache."""

from typing import Any, Final

FAKE_BOOTSTRAP_HOST: Final = "2.2.2.2"
"""SGLang's own mark of a prefill without a decode partner (`disaggregation.utils.FAKE_BOOTSTRAP_HOST`)."""

PREFILL_ONLY_PORT: Final = -0x5348454C4C
"""The bootstrap port of our prefill-only requests. SGLang carries a request's port to its scheduler and, for the fake
host, never connects to it; no other client sends a negative port."""


def keep_prefill_only_kv(_made: None, request: Any, *_arguments: Any, **_named: Any) -> None:
    """After `Req.__init__`: let a prefill-only request of ours, and no other, into the radix cache.

    SGLang bars every request with the fake host, since its own are warm-ups; ours are prefixes that a request will
    need. A prompt with overridden embeddings stays out: its KV does not follow from its token ids.
    """
    if is_ours(request) and request.positional_embed_overrides is None:
        request.skip_radix_cache_insert = False


def is_ours(request: Any) -> bool:
    """Whether it is a prefill-only request of ours."""
    return bool(request.bootstrap_host == FAKE_BOOTSTRAP_HOST and request.bootstrap_port == PREFILL_ONLY_PORT)
