"""Serve Mixture-of-Agents requests on prefill-decode disaggregated engines."""
