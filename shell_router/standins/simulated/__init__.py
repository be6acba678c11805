"""Engines whose time is computed, not spent: a prefill-decode pair for runs under a virtual clock
(B4).

They take real prompts as token ids, remember them in a radix cache as a real engine does, and
answer after the seconds that their costs say. Nothing in here knows whether the event loop's clock
is virtual.
"""
