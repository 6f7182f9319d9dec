"""What runs inside an engine's own processes and speaks to the agent beside it: standard library and msgspec only."""
