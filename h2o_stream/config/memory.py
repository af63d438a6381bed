"""The memory behind the window: what heads that retrieve have evicted, on disk and searched by attention."""

MEMORY_SUFFIX = "+memory"
"""After the name of a policy that has a memory, where several are compared."""

MEMORY_BYTES = 4 << 30
"""Limit of the memory of a stream on disk, with ``auto``."""

MEMORY_SHARE = 0.4
"""Fraction of the KV heads that have a memory, at most: those that retrieve most."""

MEMORY_DISTANCE = 1024
"""Largest distance at which a token in memory is seen, in tokens."""

MEMORY_PROMPT_PERIOD = 8
"""Tokens from one search of a head to the next in prompts; in between, queries look around what the last one found. The
last chunk of a prompt, which asks, searches with every token."""

MEMORY_CANDIDATES, MEMORY_MATCHES = 48, 16
"""Tokens that codes find for each query, about, and tokens in memory that it attends to."""

MEMORY_QUESTION_CANDIDATES = 200
"""Tokens that codes find for each query in the last chunk of a prompt, which asks."""

MEMORY_CHAPTER = 16
"""Segments of the memory that have an index together."""

MEMORY_BLOCKS = 128
"""Blocks of 64 tokens that are scanned for each query, about, of those with an index."""

MEMORY_MIN_INDEX = 4
"""Times as many blocks there must be for an index to be faster than reading all codes."""
