"""The embedded pair: a prefill and a decode server over transformers that speak SGLang's native
wire format.

`settings` and `launch` are what the router imports; they load no torch. Everything else runs in the
servers.
"""
