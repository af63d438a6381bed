"""Policies from the literature, one per file, each with its source and how it differs from it."""
