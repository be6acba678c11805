"""Starts the engines that a deployment names, keeps them running, and stops them: `plan` decides,
`supervisor` acts.
"""
