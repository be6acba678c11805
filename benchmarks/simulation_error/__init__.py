"""Parts of benchmarks/simulation_error.py: the settings, what is measured in turns, and the same
simulated.
"""
