"""Records of routing for `expert_placement.py`."""
