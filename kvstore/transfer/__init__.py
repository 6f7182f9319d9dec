"""Moving slots from a peer's pool into one's own."""
