"""The laboratory: what was measured on the way, and policies to compare with.

It comes in by the entry points that other packages use (docs/extending.md); nothing in `h2o_stream` names it.
"""
