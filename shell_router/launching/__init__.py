"""A deployment's engines on this machine: `plan` decides on commands, `supervisor` runs them."""
