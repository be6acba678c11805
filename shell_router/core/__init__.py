"""Values and contracts that every layer shares. No I/O."""
