"""Windows by head in a model whose retrieval head is known, because it was built by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from tests.induction import INDUCTION, make_induction_model

LIST, BETWEEN, WINDOW = 120, 100, 96


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_induction_model()


@torch.no_grad()
def loss_of_the_copy(model: LlamaForCausalLM, config: CacheConfig | None) -> float:
    """Nats per token of a list of tokens that comes again after others."""
    listed, others = torch.randperm(512, generator=torch.Generator().manual_seed(1))[: LIST + BETWEEN].split(
        (LIST, BETWEEN)
    )
    ids = torch.cat((listed, others, listed))[None]
    if config is None:
        logits = model(ids).logits[0]
    else:
        with attach(model, config) as cache:
            logits = torch.cat([model(token, past_key_values=cache).logits[0] for token in ids.split(4, 1)])
    return float(cross_entropy(logits[-LIST:-1], ids[0, 1 - LIST :]))


def test_the_known_head_gets_the_largest_window(model: LlamaForCausalLM) -> None:
    with attach(model, CacheConfig("h2o", WINDOW)) as cache:
        windows = {
            (number, head): group.schedule.window
            for number, layer in enumerate(cache.layers)
            for group in layer.head_groups
            for head in group.heads.tolist()
        }
    assert windows.pop(INDUCTION) > LIST + BETWEEN + LIST
    assert max(windows.values()) < WINDOW


@pytest.mark.exhaustive
def test_it_copies_where_equal_windows_forget(model: LlamaForCausalLM) -> None:
    assert loss_of_the_copy(model, None) < 0.02
    assert loss_of_the_copy(model, CacheConfig("h2o", WINDOW)) < 0.02
    assert loss_of_the_copy(model, CacheConfig("h2o", WINDOW, kv_bits=6)) < 0.05
    forgetful = CacheConfig("h2o", WINDOW, budgets="equal"), CacheConfig("sink", WINDOW)
    for config in forgetful:
        assert loss_of_the_copy(model, config) > 10, config
