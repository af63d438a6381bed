"""Loads models: without torch what `runtime` describes, and through transformers the rest."""
