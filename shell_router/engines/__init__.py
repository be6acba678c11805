"""Adapters to engines: the prefill-decode pair over HTTP, the embedded pair, embedders."""
