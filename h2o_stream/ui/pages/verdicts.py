"""One sentence for each comparison: what its records say, with the figures that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

Record = Mapping[str, Any]

_NAMED = 4
"""Policies or engines named in a sentence, at most."""

_LIMITS = 3
"""Windows or sizes named in a sentence, at most."""


def loss(records: Sequence[Record]) -> str:
    """What each policy loses against a full cache at every window or size, a mean over texts and seeds."""
    added: dict[tuple[int, str], dict[str, list[float]]] = {}
    for record in records:
        if record["to_full"]:
            size = record["cache_size"]
            limit = (size, f"{size / 2**20:.3g} MiB") if size else (record["window"], f"window {record['window']}")
            added.setdefault(limit, {}).setdefault(record["policy"], []).append(record["to_full"]["mean"])
    phrases = []
    for _, limit in _some(sorted(added)):
        means = {policy: fmean(found) for policy, found in added[_, limit].items()}
        best, *others = _named(means, smallest=True)
        verb = f"loses {means[best]:.2g}" if means[best] >= 0 else f"gains {-means[best]:.2g}"
        phrases.append(f"at {limit} {best} {verb} nats" + "".join(f", {name} {means[name]:.2g}" for name in others))
    return _sentence(phrases, " per token against the full cache")


def share(values: Mapping[str, float], what: str) -> str:
    """Shares by policy, the largest first: "h2o keeps 71%, sink 40% of ..."."""
    if not values:
        return ""
    names = _named(values, smallest=False)
    return _sentence([", ".join(f"{name} {values[name]:.0%}" for name in names)], f" {what}")


def decoding(records: Sequence[Record]) -> str:
    """How fast ours decodes at the longest history that all engines reached, beside the others."""
    ours = [record for record in records if record["engine"] == "h2o-stream" and record["policy"] == "h2o"]
    common = set.intersection(*(_histories(records, name) for name in {record["name"] for record in records}))
    if not (ours and common):
        return ""
    history = max(common)
    fastest: dict[str, Record] = {}
    for record in sorted(records, key=lambda record: float(record["decode_tok_s"])):
        if record["history"] == history:
            fastest[record["name"]] = record
    name = ours[0]["name"]
    speeds, own = {other: record["decode_tok_s"] for other, record in fastest.items()}, weights(fastest[name])
    others = [
        f"{speeds[name] / speeds[other]:.2g}x {other}" + ("" if weights(record) == own else f" ({weights(record)})")
        for other, record in fastest.items()
        if other != name and speeds[other]
    ]
    told = f", {', '.join(others)}" if others else ""
    return f"After {history:,} tokens {name} decodes {speeds[name]:.3g} tokens/s{told}."


def weights(record: Record) -> str:
    """In what form an engine holds the weights."""
    ours = record["engine"] == "h2o-stream" and record["quantize"] != "none"
    return str(record["quantize"] if ours else record["dtype"])


def times_full(records: Sequence[Record]) -> str:
    """Throughput of the largest batches in multiples of the full cache's, by shape."""
    largest = [record for record in records if record["largest"]]
    full = {_shape(record): record["tok_s"] for record in largest if record["policy"] == "full"}
    phrases = []
    for shape in _some(list(full)):
        speeds = {record["policy"]: record["tok_s"] for record in largest if _shape(record) == shape}
        names = [name for name in _named(speeds, smallest=False) if name != "full"]
        told = ", ".join(f"{name} {speeds[name] / full[shape]:.2g}x" for name in names)
        phrases += [f"at {shape} {told}"] if told else []
    return _sentence(phrases, " the tokens/s of a full cache in the same memory")


def _histories(records: Sequence[Record], name: str) -> set[int]:
    return {record["history"] for record in records if record["name"] == name}


def _shape(record: Record) -> str:
    return f"{record['prompt']}+{record['new']}"


def _named(values: Mapping[str, float], smallest: bool) -> list[str]:
    """The names to tell, best first: the best, h2o, sink, and the worst."""
    order = sorted(values, key=lambda name: values[name], reverse=not smallest)
    wanted = [order[0], *(name for name in order if name.split()[0] in ("h2o", "sink"))][: _NAMED - 1] + order[-1:]
    return sorted(set(wanted), key=order.index)[:_NAMED]


def _some(limits: list[Any]) -> list[Any]:
    """At most `_LIMITS` of a list, with the first and the last."""
    last = len(limits) - 1
    return [limits[round(n * last / (_LIMITS - 1))] for n in range(_LIMITS)] if len(limits) > _LIMITS else limits


def _sentence(phrases: Sequence[str], end: str) -> str:
    text = "; ".join(phrases)
    return f"{text[0].upper()}{text[1:]}{end}." if text else ""
