"""Models with the statistics of real ones are neither refused nor read wrongly, and wrong ones are still found."""

import copy
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_lab.certify import CertifyOptions, certify
from h2o_stream import CacheConfig, attach
from h2o_stream.attachment import native_steps
from h2o_stream.attachment.describe import describe
from h2o_stream.attachment.model_facts import max_distance_of
from h2o_stream.attachment.support import layer_specs
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load
from h2o_stream.native.description import Description
from h2o_stream.runtime.sources import ModelFile
from tests.descriptions import difference
from tests.families import FAMILIES, GROUPED, tiny
from tests.family_models import GGUF, MODELS, RECURRENT
from tests.family_models import written as family_file
from tests.fixtures import refusal
from tests.more_families import OTHERS
from tests.real_statistics import with_real_statistics

DTYPES = (torch.float32, torch.bfloat16)
MADE: dict[str, Callable[[], Any]] = {
    **{f"{name}, file": MODELS[name].make for name in MODELS if name not in RECURRENT and name != "Gemma 3n"},
    **{family.name: family.make for family in FAMILIES if family.native},
    **OTHERS,
}
FILES = [name for name in GGUF if MODELS[name].checkpoint or name in RECURRENT]
ABSOLUTE = ("OPT", "OPT, without biases", "HunYuan, file", "HunYuan MoE, file")
"""Models without RoPE, or which norm queries and keys after it: their weights of a pair differ, so no rotation can be
taken back."""
REFUSED = ("StableLM, file", "StableLM, biases", "StableLM, parallel", "Nemotron, file")
"""Whose attention passes no keywords on, whatever their statistics; their files are served without torch."""
TIE = ("Qwen 3 MoE", 2, "bfloat16")
"""Whose last token has a second and a third expert 4e-4 apart, which is less than rounding of packed products."""
SOME = ("Qwen 2", "Gemma 3", "Qwen 3 MoE", "Granite 4")
"""Families of the default suite; `make test-all` takes all, with more seeds."""

LARGE = {
    "152k": {"vocab_size": 151_936, "head_dim": 256},
    "262k": {"vocab_size": 262_144, "tie_word_embeddings": True},
}
"""Vocabularies of real models, of which the last rows belong to no token."""


pytestmark = pytest.mark.usefixtures("nothing_is_known")


@functools.cache
def made(name: str, seed: int, dtype: torch.dtype) -> Any:
    return with_real_statistics(MADE[name](), seed).to(dtype)


def cases(names: Iterable[str], *rest: Iterable[Any]) -> list[Any]:
    """Every name with every further value and three seeds; the default suite takes some names with one seed."""
    return [
        pytest.param(name, seed, *values, marks=() if name in SOME and not seed else pytest.mark.exhaustive)
        for name in names
        for seed in range(3)
        for values in ([(value,) for value in rest[0]] if rest else [()])
    ]


def refused(reason: str, name: str, seed: int) -> bool:
    """Whether one of the wilder models runs eagerly, as it should where rounding hides what it computes."""
    return (name not in SOME or seed > 0) and reason.endswith("is rounding")


class TestThroughTorch:
    @pytest.mark.parametrize(("name", "seed", "dtype"), cases([name for name in MADE if name not in REFUSED], DTYPES))
    def test_are_attached_natively(self, name: str, seed: int, dtype: torch.dtype) -> None:
        positions: Any = "absolute" if name in ABSOLUTE else None
        config = CacheConfig(window=32, budgets="equal", positions=positions)
        with attach(made(name, seed, dtype), config) as cache:
            note = cache.engine_note
            assert note.startswith("native") or refused(note, name, seed), note

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rope_is_seen_beside_large_biases(self, dtype: torch.dtype) -> None:
        """Where it turns slowest: the rest of a key is smaller than their rounding."""
        model = copy.deepcopy(tiny("Qwen2", **{**GROUPED, "head_dim": 64})()).to(dtype)
        attentions = [layer.self_attn for layer in model.model.layers]
        for projection in (part for attention in attentions for part in (attention.q_proj, attention.k_proj)):
            projection.weight.data *= 0.2
            projection.bias.data.view(-1, 64)[:, [31, 63]] = 211.0
        plan = CacheConfig(window=32).plan(max_distance_of(model.config))
        assert all(spec.table is not None for spec in layer_specs(model, plan))

    @pytest.mark.parametrize("size", ["152k", pytest.param("262k", marks=pytest.mark.exhaustive)])
    def test_large_vocabularies(self, size: str) -> None:
        model = with_real_statistics(tiny("Qwen2", **{**GROUPED, **LARGE[size]})()).bfloat16()
        with attach(model, CacheConfig(window=32, budgets="equal")) as cache:
            assert cache.engine_note.startswith("native"), cache.engine_note


def written(folder: Path, name: str, seed: int) -> Path:
    """The file of a model with real statistics."""
    return family_file(folder, name, model=with_real_statistics(MODELS[name].make(), seed))


class TestFiles:
    @pytest.mark.every(2)
    @pytest.mark.parametrize(("name", "seed", "dtype"), cases(FILES, ("float32", "bfloat16")))
    def test_are_described_as_through_torch(self, name: str, seed: int, dtype: str, tmp_path: Path) -> None:
        path = written(tmp_path, name, seed)
        model = load(ModelConfig(str(path), dtype=dtype)).model
        assert difference(ModelFile(str(path), path, dtype).describe(print), describe(model)) == ""

    @pytest.mark.every(2)
    @pytest.mark.parametrize(("name", "seed", "dtype"), cases(FILES, ("float32", "bfloat16")))
    def test_are_found_right(self, name: str, seed: int, dtype: str, tmp_path: Path) -> None:
        path = written(tmp_path, name, seed)
        differences = certify(CertifyOptions(str(path), ModelConfig(dtype=dtype)), print)
        assert len(differences) == ((name, seed, dtype) == TIE)


def _with_flipped_norms(description: Description) -> Description:
    norm = description.norm
    assert norm.weight is not None
    return replace(description, norm=replace(norm, weight=1 + norm.weight))


def _with_turned_halves(layer: Any) -> Any:
    attention = layer.attention
    order = torch.arange(attention.head_size).view(2, -1).flip(0).flatten().int()
    return replace(layer, attention=replace(attention, rope=replace(attention.rope, order=order)))


def _with_swapped_matrices(layer: Any) -> Any:
    return replace(layer, mlp=replace(layer.mlp, gate=layer.mlp.up, up=layer.mlp.gate))


def _everywhere(mistake: Callable[[Any], Any]) -> Callable[[Description], Description]:
    return lambda description: replace(description, layers=[mistake(layer) for layer in description.layers])


def _with_other_scaling(layer: Any) -> Any:
    return replace(layer, attention=replace(layer.attention, scaling=1.02 * layer.attention.scaling))


MISTAKES = {
    "flipped norms": _with_flipped_norms,
    "turned halves": _everywhere(_with_turned_halves),
    "swapped matrices": _everywhere(_with_swapped_matrices),
    "scaling off by 2%": _everywhere(_with_other_scaling),
    "logits off by 2%": lambda description: replace(description, logit_scale=1.02 * description.logit_scale),
}


class TestMistakes:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("name", ["Llama 3", "Qwen 2", "Gemma 3"])
    @pytest.mark.parametrize("mistake", MISTAKES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_descriptions_are_found(
        self, name: str, mistake: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In bfloat16, too, where most change logits by less than rounding does."""
        monkeypatch.setattr(native_steps, "describe", lambda model: MISTAKES[mistake](describe(model)))
        with attach(made(name, 0, dtype), CacheConfig(window=32, budgets="equal")) as cache:
            assert re.match(r"eager: (in float32 )?its logits are off by", cache.engine_note), cache.engine_note

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_the_cache_are_found(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        model = with_real_statistics(MADE["Qwen 2"]()).to(dtype)
        for layer in model.model.layers:

            def patched(*args: Any, forward: Any = layer.self_attn.forward, **kwargs: Any) -> Any:
                output, probs = forward(*args, **kwargs)
                return output * (1 if "h2o_cache" in kwargs else 2), probs

            layer.self_attn.forward = patched
        assert "computes something else through this cache" in refusal(model)
