"""Windows by head on a second model, whose retrieval heads are known: those it cannot copy old text without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream.cache import retrieval_heads
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.nll import paired_difference, stream_nll
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.models.load import LoadedModel, load
from tests.induction_model import FOLDER, token_losses
from tests.induction_text import WORDS, write

LOCAL = 16
"""Newest tokens that a blinded head still sees, besides the first one."""

LENGTH, TEXTS = 768, 4
FAR = 64
"""Distance from which on a copy is one of old text."""


@pytest.fixture(scope="module")
def induction() -> LoadedModel:
    return load(ModelConfig(model=str(FOLDER), dtype="float32", device="cpu"))


@contextmanager
def masked(model: Any, layer: int, kv_head: int, visible: Tensor) -> Iterator[None]:
    """The query heads of a KV head attend to visible keys [Q, K] only, those of the other KV heads to all."""
    count, causal = len(visible), torch.ones_like(visible).tril()
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    mask = causal.repeat(model.config.num_attention_heads, 1, 1)
    mask[kv_head * group : (kv_head + 1) * group] &= visible
    additive = torch.zeros(1, *mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    def replace_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        assert kwargs["hidden_states"].shape[1] == count
        return args, {**kwargs, "attention_mask": additive}

    handle = model.model.layers[layer].self_attn.register_forward_pre_hook(replace_mask, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def rises(model: Any) -> Tensor:
    """[layers, Hkv]: how much the loss of old copies rises if a head sees only the newest tokens."""
    texts = [write(LENGTH, 10_000_000 + seed) for seed in range(TEXTS)]
    tokens = torch.tensor([text.tokens for text in texts])
    old = torch.tensor([text.distances[1:] for text in texts]) > FAR
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    local = ones.triu(1 - LOCAL)
    local[:, 0] = True

    def loss() -> float:
        return float(token_losses(model, tokens)[old].mean())

    before, rows = loss(), []
    for layer in range(model.config.num_hidden_layers):
        row = []
        for head in range(model.config.num_key_value_heads):
            with masked(model, layer, head, local):
                row.append(loss() - before)
        rows.append(row)
    return torch.tensor(rows)


def copy_losses(model: Any, config: CacheConfig, length: int) -> Tensor:
    """The losses of old copies in a text, streamed through a cache."""
    text = write(length, 20_000_000)
    (result,) = (event for event in stream_nll(model, config, text.tokens) if isinstance(event, JobResult))
    return result.values[torch.tensor(text.distances[1:]) > FAR]


def test_the_model_copies_old_text(induction: LoadedModel) -> None:
    losses = copy_losses(induction.model, CacheConfig("full"), 1000)
    assert losses.mean() < 1.5, "chance is 6.2"


def test_the_heads_that_get_more_are_those_that_copies_need(induction: LoadedModel) -> None:
    model = induction.model
    needed = rises(model).flatten()
    measured = retrieval_heads._attention_to_copy(model, [None] * model.config.num_hidden_layers).flatten()
    found = measured >= retrieval_heads._MIN_RETRIEVAL
    assert 1 <= found.sum() <= 4
    assert set(needed.topk(int(found.sum())).indices.tolist()) == set(found.nonzero().flatten().tolist())


@pytest.mark.parametrize("policy", ["h2o", "sink"])
def test_copies_cost_less_with_measured_windows_of_the_same_size(induction: LoadedModel, policy: str) -> None:
    config = {"policy": policy, "window": 64, "chunk": 16}
    measured, equal = (
        copy_losses(induction.model, CacheConfig(**config, budgets=budgets), 3000) for budgets in ("measured", "equal")
    )
    assert paired_difference(measured, equal).high < -0.2


def test_the_tokenizer_knows_the_words(induction: LoadedModel) -> None:
    tokens = write(200, 0).tokens[1:]
    assert induction.tokenizer(" ".join(WORDS[token] for token in tokens))["input_ids"] == tokens


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir()) < 450_000
