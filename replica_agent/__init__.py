"""The sidecar of one engine: reports which prefixes it holds; and the reference engine, a process of its own."""
