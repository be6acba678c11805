"""Adapters of a model on its servers: hundreds in a folder, a few of them loaded on each server at a time."""
