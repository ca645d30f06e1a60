"""General mechanisms, each once: they know nothing of caches."""
