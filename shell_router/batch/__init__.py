"""The batch mode: a workload of many models, planned over few workers (MOSAIC); and files and
batches over HTTP.
"""
