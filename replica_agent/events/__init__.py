"""The engine's KV events: how they are read off the wire, put in order and understood."""
