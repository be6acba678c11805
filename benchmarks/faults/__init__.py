"""Parts of benchmarks/faults.py: the pair that is broken, the routers before it, a client, and the
faults.
"""
