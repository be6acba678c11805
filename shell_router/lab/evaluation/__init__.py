"""The evaluation: how right, how fast and at what cost a router's models, votes and topologies
answer.
"""
