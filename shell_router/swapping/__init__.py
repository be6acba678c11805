"""Models of a deployment that take turns in memory for a few of them (CoServe)."""
