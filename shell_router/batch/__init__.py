"""The batch mode: many models planned over few workers (MOSAIC), and the Batch API."""
