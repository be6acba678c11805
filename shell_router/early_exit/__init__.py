"""Early exit of a cluster's unfinished agents: Faster-MoA's gate (Algorithm 1), ours, and votes."""
