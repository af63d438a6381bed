"""The memory in torch: what native code serves, too, and what it does not; engines that take turns."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from h2o_stream import attach
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import EngineChoice
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from tests.families import FAMILIES, config_of, rules_of
from tests.fixtures import make_llama, with_exhaustive
from tests.test_oracle import compare, tokens_of
from tests.test_token_memory import (
    BOTH,
    DISTANCE,
    MATCHES,
    ONE_CODE,
    fed,
    remembering,
    small_memory,  # noqa: F401 - used by every test
)
from tests.tolerance import relative_error

needs_library = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "policy"), with_exhaustive(
    [("GPT-NeoX", "tova"), ("gpt-oss", "h2o"), ("Kimi Linear", "h2o")],
    [("Gemma 2", "snapkv"), *((family.name, "h2o") for family in FAMILIES if not family.learned)],
))  # fmt: skip
def test_families_and_policies(name: str, policy: str) -> None:
    """Latent attention, parts without RoPE, learned sinks, softcaps, native attention in eager steps; what only torch
    computes."""
    (family,) = (family for family in FAMILIES if family.name == name)
    made = replace(config_of(family, policy, 8), memory="auto", budgets="equal")
    rules = replace(rules_of(made, family), matches=MATCHES, max_distance=DISTANCE)
    engines: tuple[EngineChoice, ...] = BOTH if library.loaded() else ("eager",)
    for seed in range(8):
        tokens = (torch.randperm(61, generator=torch.Generator().manual_seed(seed)) + 3).tolist()
        if compare(family.make(), made, rules, tokens, 49, ONE_CODE, engines):
            return
    raise AssertionError("it always comes too close to a tie")


@needs_library
def test_engines_continue_each_others_streams() -> None:
    """With the same tokens found again."""
    made, _ = remembering()
    model, tokens = make_llama(groups=3), tokens_of(2, 1010)
    logits, found = [], []
    with torch.no_grad():
        for engines in (("auto", "eager", "auto"), ("eager", "auto", "eager")):
            state = None
            for engine, (start, stop) in zip(engines, ((0, 600), (600, 1000), (1000, 1010)), strict=True):
                with attach(model, made, engine=engine) as cache:
                    if state:
                        cache.load_state_dict(state)
                    last = fed(model, cache, tokens[start:stop], alone=stop == 1010)
                    state = cache.state_dict()
                    (row,) = cache.memory.rows
                    looked_back = [tokens[index] for index in row.looked_back()]  # one of several equal keys
            logits.append(last)
            found.append(looked_back)
    assert found[0] == found[1]
    assert max(relative_error(last, logits[0]) for last in logits) < ONE_CODE


@needs_library
def test_it_is_watched_in_between() -> None:
    """Then torch attends, and native code goes on."""
    made, _ = remembering()
    model, tokens = make_llama(groups=3), tokens_of(3, 400)
    with torch.no_grad(), attach(model, made) as cache:
        fed(model, cache, tokens[:300])
        state = cache.state_dict()
        wanted = [fed(model, cache, part) for part in (tokens[300:380], tokens[380:])]
        cache.load_state_dict(state)
        for group in cache.head_groups:
            group.watch = lambda *_: None
        watched = fed(model, cache, tokens[300:380])
        for group in cache.head_groups:
            group.watch = None
        assert max(map(relative_error, [watched, fed(model, cache, tokens[380:])], wanted)) < ONE_CODE


@pytest.mark.exhaustive
def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no codes: a state goes on where there is none either."""
    made, rules = remembering()
    model, tokens = make_llama(groups=3), tokens_of(4, 90)
    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(library, "loaded", lambda: None)
            assert compare(model, made, rules, tokens, 60, ONE_CODE)
            with attach(model, made) as cache:
                fed(model, cache, tokens)
                state = cache.state_dict()
                wanted = fed(model, cache, tokens[:20])
                cache.load_state_dict(state)
                assert torch.equal(fed(model, cache, tokens[:20]), wanted)
        if library.loaded():
            with attach(model, made) as cache, pytest.raises(H2OStreamError, match="kept without the compiled library"):
                cache.load_state_dict(state)


@pytest.mark.exhaustive
@needs_library
@pytest.mark.parametrize("bits", with_exhaustive([4], [8]))
def test_few_bits(bits: Any) -> None:
    """What is evicted comes out of the bits that slots have."""
    made, _ = remembering(kv_bits=bits, window=24)
    model, tokens, logits = make_llama(groups=3), tokens_of(5, 120), []
    with torch.no_grad():
        for engine in BOTH:
            with attach(model, made, engine=engine) as cache:
                fed(model, cache, tokens[:80])
                logits.append(fed(model, cache, tokens[80:], alone=True))
    assert relative_error(*logits) < ONE_CODE


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", BOTH if library.loaded() else ["eager"])
def test_padded_rows_are_as_alone(engine: EngineChoice) -> None:
    made, _ = remembering()
    model, rows = make_llama(groups=3), [tokens_of(seed, count) for seed, count in ((5, 90), (6, 70))]
    with torch.no_grad(), attach(model, made, engine=engine) as cache:
        alone = []
        for row in rows:
            cache.reset()
            alone.append(torch.stack([fed(model, cache, row[:-1]), fed(model, cache, row[-1:])]))
        cache.reset()
        mask = torch.ones(2, 90, dtype=torch.int64)
        mask[1, :20] = 0
        batch = torch.tensor([rows[0], [0] * 20 + rows[1]])
        first = model(batch[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache).logits[:, -1]
        last = model(batch[:, -1:], attention_mask=mask, past_key_values=cache).logits[:, -1]
    assert relative_error(torch.stack((first, last), 1), torch.stack(alone)) < 1e-4


@needs_library
def test_heads_with_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups of heads, which hold more and fewer tokens, one retrieves."""
    windows = HeadWindow((0, 2), 0.7), HeadWindow((1,), 1.6)

    def assigned(model: Any, specs: Any, progress: Any) -> Any:
        return [replace(spec, windows=windows) for spec in specs]

    monkeypatch.setattr("h2o_stream.attachment.attach.give_retrieval_heads_more", assigned)
    made, _ = remembering(budgets="measured", window=24)
    model, tokens, logits, counts = make_llama(heads=3, groups=2), tokens_of(7, 150), [], []
    with torch.no_grad():
        for engine in BOTH:
            with attach(model, made, engine=engine) as cache:
                logits.append(
                    torch.stack([fed(model, cache, tokens[:120]), fed(model, cache, tokens[120:], alone=True)])
                )
                (row,) = cache.memory.rows
                counts.append(row.counts.tolist())
    assert relative_error(*logits) < ONE_CODE
    assert counts[0] == counts[1]
    assert len(counts[0]) == 2
