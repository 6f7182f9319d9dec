"""The reference engine: a small paged Llama with prefix caching, OpenAI endpoints and vLLM-compatible KV events.

It runs as its own process (`python -m replica_agent.reference`); nothing else of this product imports it.
Data flow: server -> protocol, chat -> engine (one compute thread) -> scheduler, block_pool -> model, kv_cache ->
sampler, detokenizer -> server; events leave through their own publisher thread.
"""
