"""What benchmarks/under_load.py asks, on what engines, and what came of it."""
