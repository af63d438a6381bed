"""Policies from the literature, one per file, each with its source and how it differs from it."""

from h2o_stream.cache.source import VERSIONED

VERSIONED.add("h2o_lab")  # it comes in one wheel with h2o_stream
