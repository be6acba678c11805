"""Experts of mixture-of-experts models: their placement, and servers that record them."""
