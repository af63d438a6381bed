"""Finds, converts and loads models and their tokenizers. Of the cache it only asks which models it can serve."""
