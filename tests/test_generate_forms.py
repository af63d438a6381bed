"""Every form of `generate` against the same call without a cache of ours: equal or refused, nothing else.

The window holds everything, so that nothing is evicted and any difference is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, TextGenerationPipeline

from h2o_stream import CacheConfig, H2OStreamError, attach
from tests.conftest import make_llama
from tests.tolerance import assert_close

Form = Callable[[Any, Any, dict[str, Tensor]], Any]
"""Is called with a model, a cache for it and a batch, and gives what is compared."""

PROMPTS = (11, 7, 2)
HOW: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}


def batch_of(rows: int) -> dict[str, Tensor]:
    """Prompts of different lengths, padded on the left."""
    seeded, width = torch.Generator().manual_seed(1), PROMPTS[0]
    ids = torch.randint(3, 64, (rows, width), generator=seeded)
    mask = torch.tensor([[0] * (width - count) + [1] * count for count in PROMPTS[:rows]])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(**more: Any) -> Form:
    def form(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
        torch.manual_seed(3)
        return model.generate(**batch, **{**HOW, **more})

    return form


def longer(ids: Tensor, batch: dict[str, Tensor], by: int = 4) -> dict[str, Tensor]:
    """A reply and some more tokens."""
    more = torch.randint(3, 64, (len(ids), by), generator=torch.Generator().manual_seed(2))
    ids = torch.cat((ids, more), 1)
    past = batch["attention_mask"]
    mask = torch.cat((past, past.new_ones(len(ids), ids.shape[1] - past.shape[1])), 1)
    return {"input_ids": ids, "attention_mask": mask}


def two_turns_by_cache(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    said = model.generate(**batch, **HOW, past_key_values=cache)
    return model.generate(**longer(said, batch), **HOW, past_key_values=cache)


def two_turns_by_output(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    said = model.generate(**batch, **HOW, return_dict_in_generate=True)
    return model.generate(**longer(said.sequences, batch), **HOW, past_key_values=said.past_key_values)


def config_without_cache(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    model.config.use_cache = model.generation_config.use_cache = False
    try:
        return model.generate(**batch, **HOW), model(**batch).logits[:, -1], model(**batch).past_key_values
    finally:
        model.config.use_cache = model.generation_config.use_cache = True


def by_embeddings(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    rows = model.get_input_embeddings()(batch["input_ids"])
    return model.generate(inputs_embeds=rows, attention_mask=batch["attention_mask"], **HOW)


def everything_told(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    asked = ("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate")
    out = model.generate(**batch, **HOW, **dict.fromkeys(asked, True))
    shown = batch["attention_mask"].bool()
    states = [layer[shown] if number == 0 else layer for number, step in enumerate(out.hidden_states) for layer in step]
    return [out.sequences, *out.scores, *out.logits, *states]


def attentions(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    out = model.generate(**batch, **HOW, output_attentions=True, return_dict_in_generate=True)
    return [out.sequences, *(layer for step in out.attentions for layer in step if layer is not None)]


def gradients(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    model.zero_grad()
    with torch.enable_grad():
        model(**batch, labels=batch["input_ids"]).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients_without_cache(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    model.zero_grad()
    with torch.enable_grad():
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def two_streams(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    one = model(**batch).past_key_values
    model(batch["input_ids"].flip(0) + 1)
    return model(batch["input_ids"][:, :1], past_key_values=one).logits


def other_rows(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    past = model(**batch).past_key_values
    return model(torch.full((len(batch["input_ids"]) + 1, 1), 5), past_key_values=past).logits


def other_attention(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    before = model.config._attn_implementation
    past = model(**batch).past_key_values
    model.set_attn_implementation("eager")
    try:
        return model.generate(**batch, **HOW)
    finally:
        model.set_attn_implementation(before)


def packed_texts(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    return model(batch["input_ids"], position_ids=places).logits


def positions_given(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    mask, places = batch["attention_mask"], torch.arange(PROMPTS[0])[None]
    first = model(**batch, position_ids=places)
    more = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    token = first.logits[:, -1:].argmax(-1)
    place = torch.full((len(mask), 1), PROMPTS[0])
    return model(token, attention_mask=more, position_ids=place, past_key_values=first.past_key_values).logits


def padding_alone(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    """A single column that is padding in all rows but the first."""
    mask = batch["attention_mask"]
    past = model(**batch).past_key_values
    column = torch.tensor([[1]] + [[0]] * (len(mask) - 1))
    mask = torch.cat((mask, column), 1)
    past = model(torch.full((len(mask), 1), 9), attention_mask=mask, past_key_values=past).past_key_values
    mask = torch.cat((mask, torch.ones_like(column)), 1)
    place = mask.sum(1, keepdim=True) - 1
    return model(torch.full((len(mask), 1), 9), attention_mask=mask, past_key_values=past, position_ids=place).logits


def hidden_past(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    mask = batch["attention_mask"]
    past = model(**batch).past_key_values
    mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    mask[:, -3] = 0
    return model(torch.full((len(mask), 1), 9), attention_mask=mask, past_key_values=past).logits


def cache_left_empty(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    mine = DynamicCache(config=model.config)
    model(**batch, past_key_values=mine)
    return model(batch["input_ids"][:, -1:], past_key_values=mine).logits


def compiled(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    run = torch.compile(model, backend="eager")
    past = run(**batch).past_key_values
    return run(batch["input_ids"][:, -1:], past_key_values=past).logits


def in_training_mode(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    model.train()
    try:
        return model.generate(**batch, **HOW)
    finally:
        model.eval()


def piped(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    raise NotImplementedError


FORMS: dict[str, Form] = {
    "greedy": generate(),
    "sampling": generate(do_sample=True, temperature=0.7, top_k=20, top_p=0.9),
    "penalties": generate(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "beams": generate(num_beams=3),
    "beams returned": generate(num_beams=3, num_return_sequences=3, length_penalty=0.5),
    "beams sampled": generate(num_beams=3, do_sample=True),
    "several samples": generate(do_sample=True, num_return_sequences=2),
    "guidance": generate(guidance_scale=1.5),
    "prompt lookup": generate(prompt_lookup_num_tokens=3),
    "no cache": generate(use_cache=False),
    "no cache by config": config_without_cache,
    "in chunks": generate(prefill_chunk_size=4),
    "static cache": generate(cache_implementation="static"),
    "two turns by cache": two_turns_by_cache,
    "two turns by output": two_turns_by_output,
    "by embeddings": by_embeddings,
    "everything told": everything_told,
    "attentions": attentions,
    "gradients": gradients,
    "gradients without cache": gradients_without_cache,
    "two streams": two_streams,
    "other rows": other_rows,
    "other attention": other_attention,
    "packed texts": packed_texts,
    "positions given": positions_given,
    "padding alone": padding_alone,
    "hidden past": hidden_past,
    "cache left empty": cache_left_empty,
    "compiled": compiled,
    "in training mode": in_training_mode,
}
