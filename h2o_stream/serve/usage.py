"""What replies took, in the forms of the API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.serve.replies import Done, Message, Piece
from h2o_stream.serve.stream import Logprob


def usage(ends: Sequence[Done]) -> dict[str, Any]:
    """The usage of all choices: the tokens of the whole prompt, of which those in the cache were not read again."""
    before, read = ends[0].seen.before, ends[0].seen.read
    replied = sum(end.seen.replied for end in ends)
    return {
        "prompt_tokens": before + read,
        "completion_tokens": replied,
        "total_tokens": before + read + replied,
        "prompt_tokens_details": {"cached_tokens": before},
        "completion_tokens_details": {"reasoning_tokens": sum(end.seen.thought for end in ends)},
    }


def report(end: Done) -> dict[str, Any]:
    """What only this server reports: where the reply comes from, and what its conversation has seen and kept."""
    return {
        "conversation": end.conversation or None,
        "turn": end.turn,
        "origin": end.origin,
        "turns_known": end.known,
        "turns_read": end.read,
        "seen_tokens": end.seen.counts.seen,
        "window": end.seen.counts.window_note,
        "kept_tokens": end.seen.counts.cached,
        "evicted_tokens": end.seen.counts.evicted,
        "slots": slots(end.seen.counts),
    }


def slots(counts: CacheCounts) -> dict[str, int]:
    """What the slots of a layer's KV head hold, in the mean, and how many tokens were seen and evicted."""
    return {**asdict(counts), "free": counts.free, "evicted": counts.evicted}


def logprobs_of(messages: Iterable[Message]) -> list[Logprob]:
    """Those of pieces, in order."""
    return [logprob for message in messages if isinstance(message, Piece) for logprob in message.logprobs]
