"""Values and protocols that several packages share."""
