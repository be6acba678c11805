"""The evaluation: the accuracy, latency and cost of a router's models, votes and topologies."""
