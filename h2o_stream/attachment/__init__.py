"""Joins a transformers model with a cache: what is supported, the replaced forward, verification, measured windows."""
