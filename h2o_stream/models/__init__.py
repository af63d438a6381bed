"""Finds, converts and loads models and their tokenizers. Knows nothing of caches being attached to them."""
