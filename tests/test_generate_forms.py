"""Every form of `generate` against the same call without our cache: equal or refused, nothing else.

The window holds everything, so nothing is evicted and any difference is an error.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase, TextGenerationPipeline

from h2o_stream import CacheConfig, H2OStreamError, attach
from tests.families import FAMILIES
from tests.fixtures import make_llama, thinned, with_exhaustive
from tests.in_turn import in_turn
from tests.tolerance import assert_close

Form = Callable[[Any, Any, dict[str, Tensor]], Any]
"""Called with a model, a cache and a batch; returns the values to compare."""

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
    """A reply, continued by more tokens."""
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


def gradients(model: Any, cache: Any, batch: dict[str, Tensor], **more: Any) -> Any:
    model.zero_grad()
    with torch.enable_grad():
        model(**batch, labels=batch["input_ids"], **more).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def two_streams(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    one = model(**batch).past_key_values
    model(batch["input_ids"].flip(0) + 1)
    return model(batch["input_ids"][:, :1], past_key_values=one).logits


def other_attention(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model.generate(**batch, **HOW)
    finally:
        model.set_attn_implementation(before)


def packed_texts(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]])
    return model(batch["input_ids"], position_ids=places).logits


def step(model: Any, past: Any, mask: Tensor, token: int = 9) -> Any:
    """Feed one column, which is a token where the mask ends with 1, as `generate` does."""
    place = (mask.sum(1, keepdim=True) - 1).clamp_min(0)
    tokens = torch.full((len(mask), 1), token)
    return model(tokens, attention_mask=mask, position_ids=place, past_key_values=past, use_cache=True)


def with_column(mask: Tensor, *column: int) -> Tensor:
    return torch.cat((mask, torch.tensor(column)[:, None]), 1)


def prompted(model: Any, batch: dict[str, Tensor], **more: Any) -> Any:
    places = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return model(**batch, position_ids=places, use_cache=True, **more).past_key_values


def positions_given(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    """Positions that count padding, as transformers does by default, passed explicitly."""
    mask, places = batch["attention_mask"], torch.arange(PROMPTS[0])[None]
    first = model(**batch, position_ids=places, use_cache=True)
    token, mask = first.logits[:, -1:].argmax(-1), with_column(mask, *[1] * len(mask))
    place = torch.full((len(mask), 1), PROMPTS[0])
    return model(token, attention_mask=mask, position_ids=place, past_key_values=first.past_key_values).logits


def padding_alone(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    """One column that is padding in all rows but the first."""
    mask, rows = batch["attention_mask"], len(batch["attention_mask"])
    past = prompted(model, batch)
    mask = with_column(mask, 1, *[0] * (rows - 1))
    past = step(model, past, mask).past_key_values
    return step(model, past, with_column(mask, *[1] * rows)).logits


def hidden_past(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    mask, past = batch["attention_mask"], model(**batch).past_key_values
    mask = with_column(mask, *[1] * len(mask))
    mask[:, -3] = 0
    return model(torch.full((len(mask), 1), 9), attention_mask=mask, past_key_values=past).logits


def cache_left_empty(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    mine = DynamicCache(config=model.config)
    model(**batch, past_key_values=mine)
    return model(batch["input_ids"][:, -1:], past_key_values=mine).logits


def in_training_mode(model: Any, cache: Any, batch: dict[str, Tensor]) -> Any:
    torch.manual_seed(3)
    model.train()
    try:
        return model.generate(**batch, **HOW)
    finally:
        model.eval()


FORMS: dict[str, Form] = {
    "greedy": generate(), "sampling": generate(do_sample=True, temperature=0.7, top_k=20, top_p=0.9),
    "penalties": generate(repetition_penalty=1.3, no_repeat_ngram_size=3), "beams": generate(num_beams=3),
    "beams returned": generate(num_beams=3, num_return_sequences=3, length_penalty=0.5),
    "beams sampled": generate(num_beams=3, do_sample=True),
    "several samples": generate(do_sample=True, num_return_sequences=2),
    "guidance": generate(guidance_scale=1.5), "prompt lookup": generate(prompt_lookup_num_tokens=3),
    "no cache": generate(use_cache=False), "no cache by config": config_without_cache,
    "in chunks": generate(prefill_chunk_size=4), "static cache": generate(cache_implementation="static"),
    "two turns by cache": two_turns_by_cache, "two turns by output": two_turns_by_output,
    "by embeddings": by_embeddings, "everything told": everything_told, "attentions": attentions,
    "gradients": gradients, "gradients without cache": functools.partial(gradients, use_cache=False),
    "two streams": two_streams, "other attention": other_attention,
    "packed texts": packed_texts, "positions given": positions_given, "padding alone": padding_alone,
    "hidden past": hidden_past, "cache left empty": cache_left_empty, "in training mode": in_training_mode,
}  # fmt: skip

REFUSED = {
    "h2o": {
        "attentions", "gradients", "hidden past", "in training mode", "other attention", "packed texts",
        "prompt lookup",
    },
    "full": set[str](),
    "any": {"cache left empty", "guidance", "two streams"},
}  # fmt: skip
WAYS = [("h2o", "auto"), ("h2o", "eager"), ("full", "auto")]


def flat(x: Any) -> list[Any]:
    return [leaf for item in x for leaf in flat(item)] if isinstance(x, list | tuple) else [x]


def check(actual: Any, expected: Any) -> None:
    for ours, theirs in zip(flat(actual), flat(expected), strict=True):
        if not isinstance(theirs, Tensor):
            assert ours is theirs
        elif theirs.is_floating_point():
            assert_close(ours, theirs)
        else:
            assert ours.equal(theirs)


def make_model() -> Any:
    """A tiny Llama that would drop attention in training mode."""
    model = make_llama(groups=2)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    return model


def model_for(name: str) -> Any:
    model = make_model()
    if name == "attentions":
        model.set_attn_implementation("eager")
    return model


@functools.cache
def expected(name: str, rows: int) -> Any:
    """The result of a form without our cache."""
    model = model_for(name)
    return FORMS[name](model, DynamicCache(config=model.config), batch_of(rows))


@pytest.mark.every(2)
@in_turn("name", FORMS)
@pytest.mark.parametrize(("policy", "engine", "rows"), thinned(
    [(*way, rows) for way in WAYS for rows in (1, 3)],
    lambda policy, engine, rows: engine == "auto" and rows == (1 if policy == "full" else 3),
))  # fmt: skip
def test_equal_or_refused(name: str, policy: str, engine: Any, rows: int) -> None:
    form, model, batch = FORMS[name], model_for(name), batch_of(rows)
    if (name, rows) == ("prompt lookup", 3):
        return  # transformers serves one row only
    masked = (name, rows) == ("static cache", 3)  # needs a cache of fixed size
    refused = masked or name in REFUSED[policy] | REFUSED["any"]
    if refused:
        with attach(model, CacheConfig(policy, window=64), engine=engine) as cache, pytest.raises(H2OStreamError):
            form(model, cache, batch)
        return
    with attach(model, CacheConfig(policy, window=64), engine=engine) as cache:
        check(form(model, cache, batch), expected(name, rows))


@pytest.mark.parametrize(("policy", "rows"), [("h2o", 1), ("full", 1), ("h2o", 3)])
def test_masks_by_kinds_of_attention(policy: str, rows: int) -> None:
    """Regression: models that slide got a dict of masks for a cache of fixed size, which has no shape."""
    gemma = next(family for family in FAMILIES if family.name == "Gemma 3")
    model, generate = copy.deepcopy(gemma.make()), FORMS["static cache"]
    expected = generate(model, None, batch_of(rows))
    with attach(model, CacheConfig(policy, window=64)) as cache:
        if rows > 1:
            with pytest.raises(H2OStreamError):
                generate(model, cache, batch_of(rows))
        else:
            check(generate(model, cache, batch_of(rows)), expected)


@pytest.mark.parametrize(("policy", "engine"), with_exhaustive(WAYS[:1], WAYS[1:]))
def test_stop_strings_and_pipelines(talker: Any, tokenizer: PreTrainedTokenizerBase, policy: str, engine: Any) -> None:
    model = talker()
    inputs = tokenizer(["The sky is"], return_tensors="pt")
    pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer, device="cpu")

    def generated(stop: str) -> list[Any]:
        how = {**HOW, "max_new_tokens": 12}
        stopped = model.generate(**inputs, **how, stop_strings=[stop], tokenizer=tokenizer)
        return [stopped, pipe("The sky is", return_full_text=False, **how)[0]["generated_text"]]

    reply = model.generate(**inputs, **{**HOW, "max_new_tokens": 12})[0, -6:-5]
    expected = generated(tokenizer.decode(reply))
    with attach(model, CacheConfig(policy, window=64), engine=engine):
        ours = generated(tokenizer.decode(reply))
    assert ours[0].equal(expected[0])
    assert ours[0].shape[1] < inputs["input_ids"].shape[1] + 12
    assert ours[1] == expected[1]


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_a_model_that_is_compiled_around_the_attached_one(policy: str) -> None:
    model, batch = make_llama(), batch_of(3)

    def two_steps(run: Any) -> list[Tensor]:
        first = run(**batch)
        mask = with_column(batch["attention_mask"], 1, 1, 1)
        return [first.logits[:, -1], step(run, first.past_key_values, mask).logits]

    with attach(model, CacheConfig(policy, window=64)) as cache:
        expected = two_steps(model)
        ours = two_steps(torch.compile(model, backend="eager"))
        assert cache.seen_tokens == PROMPTS[0] + 1
    check(ours, expected)
