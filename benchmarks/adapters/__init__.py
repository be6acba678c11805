"""Parts of benchmarks/adapters.py."""
