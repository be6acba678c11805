"""The fleets of benchmarks/fleet.py: what is measured of a router and Redis, and the simulation."""
