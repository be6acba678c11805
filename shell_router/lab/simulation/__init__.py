"""The online path under a virtual clock, on engines whose work costs what a profile or a roofline
gives.
"""
