"""The agent's pool of KV blocks: its engine saves and loads them, peers read them, and the agent fetches theirs."""
