"""Parts of benchmarks/router_overhead.py: processes under test, a load client, and the three
measurements.
"""
