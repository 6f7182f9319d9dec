"""The router in front of the replicas: an OpenAI-compatible endpoint that sends a request to the KV it needs."""
