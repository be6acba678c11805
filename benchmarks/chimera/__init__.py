"""Chimera's setting in virtual time: its tasks, predictors as good as its own, and engines by
roofline.
"""
