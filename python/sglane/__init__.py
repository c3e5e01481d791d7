"""sglane: an LLM serving engine with one copy of the KV cache for all context-parallel ranks."""
__version__ = "0.1.0"
