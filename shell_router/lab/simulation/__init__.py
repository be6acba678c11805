"""The online path under a virtual clock, on engines with the costs of a profile or a roofline."""
