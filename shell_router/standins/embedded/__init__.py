"""The embedded pair: two servers over transformers that speak SGLang's native wire format.

The router imports `kind`, `fleet` and `settings`, which load no torch. All other modules run in
the servers.
"""
