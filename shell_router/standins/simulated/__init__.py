"""A prefill-decode pair whose time is computed, not spent, for runs under a virtual clock.

Its engines take real prompts as token ids, keep them in a radix cache as a real engine does, and
answer after the seconds of their costs. No module here knows whether the event loop's clock is
virtual.
"""
