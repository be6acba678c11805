"""What benchmarks/gimbal.py asks, of what engines, and what came of it."""
