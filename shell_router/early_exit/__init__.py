"""When the unfinished agents of a cluster are cut off: Faster-MoA's gate (section 4.2, Algorithm 1)
and ours.
"""
