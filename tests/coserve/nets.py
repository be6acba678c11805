"""Torch modules that a component pool's file may name."""

import torch


def linear() -> torch.nn.Module:
    """16 numbers in, 4 out."""
    return torch.nn.Linear(16, 4)


def wide() -> torch.nn.Module:
    """16 numbers in and out, 4,096 in between."""
    return torch.nn.Sequential(torch.nn.Linear(16, 4096), torch.nn.Linear(4096, 16))
