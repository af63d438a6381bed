"""Masking instead of dropping: the same tokens are seen, the same logits come out, and memory grows."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from h2o_lab.masked.masking import MaskedStream, masked_attention, masked_plan, policy_rule
from h2o_stream import CacheConfig, ConfigError, attach
from tests.commands import invoke, records
from tests.fixtures import with_exhaustive
from tests.tolerance import assert_close


def ids(count: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(9)).tolist()
    return tokens


@pytest.mark.every(2)
@pytest.mark.parametrize(("policy", "chunk"), with_exhaustive(
    [("h2o-paper", 1), ("recent", 7), ("sink", 7), ("random", 7), ("tova", 7)],
    [("h2o-paper", 7), ("recent", 1), ("sink", 1), ("random", 1), ("tova", 1)],
))  # fmt: skip
def test_the_same_tokens_are_kept_as_by_dropping(grouped: LlamaForCausalLM, policy: str, chunk: int) -> None:
    config, tokens = CacheConfig(policy, 16, positions="absolute", chunk=chunk), ids(70)
    layers = range(grouped.config.num_hidden_layers)
    dropped = []
    with attach(grouped, config) as cache:
        for start in range(0, len(tokens), chunk):
            logits = grouped(torch.tensor([tokens[start : start + chunk]]), past_key_values=cache).logits[0]
            dropped.append((logits, [cache.kept(layer) for layer in layers]))
        memory = cache.nbytes
    plan = masked_plan(config)
    with masked_attention(grouped):
        stream, sizes = MaskedStream(grouped, plan, policy_rule(plan)), []
        for number, start in enumerate(range(0, len(tokens), chunk)):
            assert_close(stream.feed(tokens[start : start + chunk]), dropped[number][0])
            for layer in layers:
                assert torch.equal(stream.kept(layer), dropped[number][1][layer])
            sizes.append(stream.nbytes)
    assert sizes[-1] > 2 * sizes[len(sizes) // 3] > memory, "nothing leaves"


def test_nothing_masked_is_the_model_itself(grouped: LlamaForCausalLM) -> None:
    tokens = ids(40)
    before = grouped.config._attn_implementation
    with masked_attention(grouped):
        stream = MaskedStream(grouped, CacheConfig("h2o-paper", 8).plan())
        logits = torch.cat([stream.feed(tokens[:25]), stream.feed(tokens[25:])])
        assert stream.kept().shape[-1] == 40
    assert grouped.config._attn_implementation == before
    assert_close(logits, grouped(torch.tensor([tokens])).logits[0])


@pytest.mark.parametrize(("config", "words"), [
    (CacheConfig("h2o", 16), "keeps more than a score"),
    (CacheConfig("h2o-paper", 16, positions="rolling"), "--masked takes --positions absolute"),
    (CacheConfig("h2o-paper", 16, kv_bits=4), "--masked takes --kv-bits 16"),
])  # fmt: skip
def test_what_cannot_be_masked(config: CacheConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        policy_rule(masked_plan(config))


def test_loss_by_masking_is_that_by_dropping(tiny_folder: Path, text: Path) -> None:
    losses = {}
    for way in ([], ["--masked"]):
        done = invoke(
            "h2o-compare", "nll", "-m", tiny_folder, "--text", text, "--tokens", "200", "--windows", "32", "-q",
            "--dtype", "float32", "--policies", "full,h2o-paper", "--positions", "absolute", "--jsonl", "-", *way,
        )  # fmt: skip
        assert done.exit_code == 0, done.stderr
        losses[bool(way)] = [(record["nll"], record["cache_bytes"]) for record in records(done.stdout)[1:3]]
    (full, ours), (masked_full, masked) = losses[False], losses[True]
    assert masked_full[0] == pytest.approx(full[0], abs=1e-5)
    assert masked[0] == pytest.approx(ours[0], abs=1e-5)
    assert masked[0] != pytest.approx(full[0], abs=1e-6), "something was masked"
    assert masked[1] >= masked_full[1] > ours[1]
