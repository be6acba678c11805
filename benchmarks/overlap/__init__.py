"""Parts of benchmarks/overlap.py: what it runs on, the four settings, and what a trace says of one
run.
"""
