"""The outcome of every entry of transformers' causal-LM map, for the tests and for lab/docs/families.md."""

import functools
import re
import sys
from typing import Any, get_args

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, UnsupportedModelError, attach
from h2o_stream.config import EngineChoice, Positions
from tests.causal_models import ENTRIES, logits_of, make

PROMPT, STEPS = 29, 4

WRONG = 1e-4
"""Allowed RMS difference between logits with our cache and without, relative to the RMS of the latter."""

SAME = 1e-6
"""The same for a detached model, which must compute what it did before."""

_REFUSALS = {
    "layers of another kind: indexed, compressed": r"has (\w+, )*\w+ layers;",
    "nothing that grows: states of constant size in all layers": "no layer whose memory would grow",
    "states that do not go through a cache": "keeps states",
    "an attention that cannot be replaced": "registry",
    "an unknown number of learned positions": "does not say how many",
    "biases by position in its attention": "uses position_bias",
    "tokens that attend to later ones: an encoder": "attend to later ones",
    "keywords of a forward do not reach its attention": "does not pass extra keywords on",
    "something else comes out, or it fails; the check says which": "computes something else|fails",
}
"""Kinds of refusals, with a pattern for their messages."""

OUTCOMES = (
    "right by default, with native steps",
    "right by default, with eager steps",
    "right with `--positions absolute`",
    *(f"refused: {kind}" for kind in _REFUSALS),
)


@functools.cache
def outcome(
    entry: str,
    positions_tried: tuple[Positions | None, ...] = (None, "rolling", "absolute"),
    engines: tuple[EngineChoice, ...] = get_args(EngineChoice),
) -> str:
    """One of `OUTCOMES`: in these position modes and with these engines, the model is right or refused.

    Raises:
        AssertionError: it is wrong, or refused with an untrue reason or advice.
    """
    model = make(entry)
    words = sorted(set(range(3, 64)) - _special(model.config))
    chosen = torch.randint(len(words), (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(words)[chosen]
    wanted = logits_of(model, ids, use_cache=False)
    refusals, native = {}, False
    for positions in positions_tried:
        if positions == "absolute" and not refusals and "rolling" not in positions_tried:
            continue  # what the default positions serve is served; `make test-all` tries them all
        config = CacheConfig(window=PROMPT + STEPS + 3, positions=positions or "gap", chunk=16)  # h2o's own
        try:
            for engine in engines:
                error, note = _error(model, config, engine, ids, wanted)
                native |= positions is None and note.startswith("native")
                assert error < WRONG, f"{entry} with {positions} positions and engine {engine} is off by {error:.1e}"
        except UnsupportedModelError as refusal:
            refusals[positions] = str(refusal)
    again = logits_of(model, ids, use_cache=False)
    assert _apart(again, wanted) < SAME, f"{entry} is not as it was before"
    if not refusals:
        return OUTCOMES[0] if native else OUTCOMES[1]
    assert "rolling" not in positions_tried or (None in refusals) == ("rolling" in refusals)
    advised = {positions: "use --positions absolute" in reason for positions, reason in refusals.items()}
    if "absolute" not in refusals:
        assert all(advised.values()), refusals
        return OUTCOMES[2]
    assert not any(advised.values()), refusals
    return f"refused: {_kind(model, refusals['absolute'], ids, wanted)}"


def _error(model: PreTrainedModel, config: CacheConfig, engine: Any, ids: Tensor, wanted: Tensor) -> tuple[float, str]:
    """The difference between logits with our cache and without, and what runs the steps."""
    with attach(model, config, engine=engine) as cache:
        chunks = (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1))
        ours = torch.cat([logits_of(model, part, past_key_values=cache) for part in chunks], 1)
        return _apart(ours, wanted), cache.engine_note


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _special(config: Any) -> set[int]:
    """Placeholder tokens, such as those for images."""
    named = [value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
    return {value for value in named if isinstance(value, int)}


def _kind(model: PreTrainedModel, reason: str, ids: Tensor, wanted: Tensor) -> str:
    """The kind of a refusal's reason, after checking that the reason is true."""
    kinds = [kind for kind, said in _REFUSALS.items() if re.search(said, reason)]
    assert len(kinds) == 1, reason
    if "attend to later" in reason or "something else" in reason:
        causal = _apart(logits_of(model, ids[:, :PROMPT], use_cache=False), wanted[:, :PROMPT]) < WRONG
        assert causal == ("something else" in reason), reason
    if found := re.search(r"has ((?:\w+, )*\w+) layers;", reason):
        assert set(found[1].split(", ")) <= set(model.config.get_text_config().layer_types)
    if "does not take its attention" in reason:
        assert not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
    return kinds[0]


def sweep_table() -> str:
    """The table for lab/docs/families.md."""
    found: dict[str, list[str]] = {name: [] for name in OUTCOMES}
    for entry in ENTRIES:
        found[outcome(entry)].append(entry)
    lines = [f"| with transformers {transformers.__version__} | entries | which |", "| --- | --- | --- |"]
    lines += [f"| {name} | {len(entries)} | {', '.join(entries)} |" for name, entries in found.items()]
    return "\n".join(lines)


def rows_in(page: str) -> dict[str, list[str]]:
    """Entries by outcome, read from a page's table."""
    rows = re.findall(r"^\| ((?:right|refused).*?) \| \d+ \| (.*?) \|$", page, re.MULTILINE)
    return {name: entries.split(", ") if entries else [] for name, entries in rows}
