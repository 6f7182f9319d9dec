"""`prefix-gateway plan`: what a fleet's KV costs, computed from a model's description before anything is deployed."""
