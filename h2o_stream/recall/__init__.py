"""Finds what was said earlier and has been evicted since, so that it can be read again before a reply."""
