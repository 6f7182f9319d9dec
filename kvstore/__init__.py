"""What a KV block is, what it costs and where it lives: the library under both the gateway and the agent."""
