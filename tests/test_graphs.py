"""Compiled steps: what is traced is the eager step, graphs are made once, and nothing depends on having them."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.budgets import HeadGroup
from h2o_stream.graphs import artifacts as artifacts_module
from h2o_stream.graphs.artifacts import Artifacts, Runner
from h2o_stream.graphs.build import traced
from h2o_stream.graphs.steps import compiled
from h2o_stream.graphs.trace import Blueprint, Chunk, Step
from h2o_stream.models.quantize import quantize
from tests.conftest import make_llama
from tests.families import FAMILIES, config_of
from tests.tolerance import assert_close


class Traced(Artifacts):
    """Runs what would be compiled."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.made: dict[str, Step] = {}
        self.runs = 0

    def get(self, blueprint: Blueprint) -> Runner | None:
        if blueprint.key not in self.made:
            self.made[blueprint.key] = Step(pickle.loads(blueprint.pickled()))
        step = self.made[blueprint.key]

        def run(inputs: list[Tensor]) -> list[Tensor]:
            self.runs += 1
            return [step(inputs)]

        return run


def stream(model: PreTrainedModel, config: CacheConfig, artifacts: Artifacts | None, steps: int = 60) -> list[Any]:
    """Logits of a prompt and of single tokens after it, then what is held."""
    ids = torch.randint(3, model.config.vocab_size, (1, 20 + steps), generator=torch.Generator().manual_seed(1))
    parts = ids.split([20] + steps * [1], 1)
    with attach(model, config) as cache, nullcontext() if artifacts is None else compiled(model, cache, artifacts):
        logits = [model(part, past_key_values=cache).logits[0, -1] for part in parts]
        kept = [cache.kept(layer) for layer in range(len(cache.layers))]
        counts = cache.counts()
    return [torch.stack(logits), kept, counts]


def rows(model: PreTrainedModel, policy: str, padded: bool, artifacts: Artifacts | None) -> list[Tensor]:
    """The same of three rows, of one length or of several."""
    ids = torch.randint(3, 60, (3, 80), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(80) >= torch.tensor([[0], [4 * padded], [9 * padded]])).long()
    config = CacheConfig(policy, 24)
    with attach(model, config) as cache, nullcontext() if artifacts is None else compiled(model, cache, artifacts):
        read = [model(ids[:, :16], attention_mask=mask[:, :16], past_key_values=cache).logits[:, -1]]
        for place in range(16, 80):
            told, token = mask[:, : place + 1], ids[:, place : place + 1]
            read.append(model(token, attention_mask=told, past_key_values=cache).logits[:, -1])
        return [torch.stack(read), *(cache.kept(layer) for layer in range(len(cache.layers)))]


GROUPS = (
    (HeadGroup((0, 1, 2), 0.6),),
    (HeadGroup((0, 2), 0.9), HeadGroup((1,), 3.0)),
    (HeadGroup((1,), 0.7), HeadGroup((0, 2), 1.0)),
)


def grouped_by_head(
    monkeypatch: pytest.MonkeyPatch, groups: Sequence[tuple[HeadGroup, ...]], heads: int = 3
) -> PreTrainedModel:
    """A model of a layer for each of `groups`, whose heads have windows of different size."""

    def told(model: Any, specs: Any) -> Any:
        return [replace(spec, groups=own) for spec, own in zip(specs, groups, strict=True)]

    monkeypatch.setattr("h2o_stream.cache.attach.shared_out", told)
    return make_llama(heads=heads, groups=2, layers=len(groups), context=256)


@pytest.fixture
def by_head(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Layers with one group of heads, and with two."""
    return grouped_by_head(monkeypatch, GROUPS)


def same(one: list[Any], other: list[Any]) -> None:
    assert_close(one[0], other[0])
    assert all(map(torch.equal, one[1], other[1]))
    assert one[2] == other[2]


FAMILY_NAMES = [family.name for family in FAMILIES]


class TestTracing:
    @pytest.mark.parametrize("number", range(len(FAMILIES)), ids=FAMILY_NAMES)
    @pytest.mark.parametrize("policy", ["h2o", "sink"])
    def test_every_family(self, number: int, policy: str) -> None:
        family = FAMILIES[number]
        traced = Traced()
        config = config_of(family, policy, 8)
        same(stream(family.make(), config, None), stream(family.make(), config, traced))
        assert traced.runs > 60

    @pytest.mark.parametrize("policy", ["h2o-paper", "tova", "random", "recent"])
    @pytest.mark.parametrize("positions", ["gap", "rolling", "absolute"])
    def test_every_policy(self, grouped: PreTrainedModel, policy: str, positions: Any) -> None:
        config = CacheConfig(policy, 24, positions=positions)
        same(stream(grouped, config, None), stream(grouped, config, Traced()))

    @pytest.mark.parametrize("groups", [1, 3, 12])
    def test_groups_of_any_size(self, groups: int) -> None:
        """A sum for each query head of a group in one loop; products of matrices where there are many."""
        model, config = make_llama(heads=2, groups=groups), CacheConfig("h2o", 24)
        same(stream(model, config, None), stream(model, config, Traced()))

    def test_windows_by_head(self, by_head: PreTrainedModel) -> None:
        """Before, while and after the windows change their size, where some steps have to be eager."""
        traced = Traced()
        config = CacheConfig("h2o", 24)
        same(stream(by_head, config, None, 100), stream(by_head, config, traced, 100))
        assert len(traced.made) == 5, "one group of heads and two, while windows shrink and after; the output"
        assert traced.runs == 400 - 3, "all but one step of every group that has come to its own size"

    def test_a_window_that_shrinks_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many tokens lose their slots in a few steps, which are compiled too."""
        groups = [(HeadGroup((0, 1, 2), 1.1),), (HeadGroup((0, 1), 1.1), HeadGroup((2,), 0.5))]
        model, config, traced = grouped_by_head(monkeypatch, groups), CacheConfig("h2o", 40), Traced()
        same(stream(model, config, None), stream(model, config, traced))
        assert max(step.blueprint.at_once for step in traced.made.values()) > 3
        assert traced.runs == 180 - 1, "all but one step"

    @pytest.mark.parametrize("policy", ["h2o", "h2o-paper", "tova", "random", "recent"])
    @pytest.mark.parametrize("positions", ["gap", "absolute"])
    def test_chunks(self, by_head: PreTrainedModel, policy: str, positions: Any) -> None:
        """Before, while and after the windows change their size, with single tokens in between."""

        def run(artifacts: Artifacts | None) -> list[Any]:
            ids = torch.randint(3, 64, (1, 200), generator=torch.Generator().manual_seed(1))
            parts = ids.split([50, 30, 1, 1, 1, 9, 108], 1)
            with (
                attach(by_head, CacheConfig(policy, 24, chunk=8, positions=positions)) as cache,
                nullcontext() if artifacts is None else compiled(by_head, cache, artifacts),
            ):
                logits = [by_head(part, past_key_values=cache).logits[0, -1] for part in parts]
                kept = [cache.kept(layer) for layer in range(len(cache.layers))]
                return [torch.stack(logits), kept, cache.counts()]

        traced = Traced()
        same(run(None), run(traced))
        chunks = [step for step in traced.made.values() if isinstance(step.blueprint.module, Chunk)]
        assert len(chunks) == (3 if policy == "h2o" else 1), "for one, two and three heads"
        assert traced.runs > 50

    def test_layers_that_are_given_up_are_given_free(self, tiny: PreTrainedModel) -> None:
        """A state that is loaded makes new layers; graphs do not hold on to the old ones."""
        ids = torch.arange(3, 63)[None]
        with attach(tiny, CacheConfig("h2o", 24, chunk=8)) as cache, compiled(tiny, cache, Traced()):
            tiny(ids)
            state, old = cache.state_dict(), [weakref.ref(layer) for layer in cache.layers]
            cache.load_state_dict(state)
            gc.collect()
            assert all(layer() is None for layer in old)

    def test_layers_of_a_kind_share_a_graph_whatever_the_window(self, tiny: PreTrainedModel) -> None:
        traced = Traced()
        for window in (16, 24):
            stream(tiny, CacheConfig("h2o", window), traced)
        assert len(traced.made) == 2

    def test_pins_and_a_state(self, tiny: PreTrainedModel) -> None:
        def run(artifacts: Artifacts) -> tuple[Tensor, Tensor]:
            ids = torch.arange(3, 63)[None]
            with attach(tiny, CacheConfig("h2o", 24)) as cache, compiled(tiny, cache, artifacts):
                tiny(ids[:, :20])
                cache.pin(5, 9)
                for i in range(20, 40):
                    tiny(ids[:, i : i + 1], past_key_values=cache)
                state = cache.state_dict()
                cache.unpin()
                cache.reset()
                cache.load_state_dict(state)
                for i in range(40, 60):
                    last = tiny(ids[:, i : i + 1], past_key_values=cache).logits
                return last, cache.kept(0)

        class Never(Traced):
            def get(self, blueprint: Blueprint) -> None:
                return None

        (one, held), (other, kept) = run(Never()), run(Traced())
        assert_close(one, other)
        assert torch.equal(held, kept)
        assert set(range(5, 9)) <= set(kept.flatten().tolist())

    @pytest.mark.parametrize("policy", ["h2o", "random", "recent"])
    @pytest.mark.parametrize("padded", [False, True])
    def test_rows(self, by_head: PreTrainedModel, policy: str, padded: bool) -> None:
        """Single tokens of rows of one length or of several, before and past the window."""
        made = Traced()
        (one, *held), (other, *kept) = rows(by_head, policy, padded, None), rows(by_head, policy, padded, made)
        assert_close(one, other)
        assert all(map(torch.equal, held, kept))
        assert made.runs > 64

    @pytest.mark.parametrize("kind", ["none", "int4"])
    def test_nothing_that_grows_is_fixed_in_a_graph(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        """`traced` fails if rows, slots or distances have one size only."""
        model = grouped_by_head(monkeypatch, [(HeadGroup((0, 2), 0.7), HeadGroup((1, 3), 1.3))], heads=4)
        if kind != "none":
            quantize(model, kind)
        for run in (
            lambda made: rows(model, "h2o", False, made),
            lambda made: stream(model, CacheConfig("h2o", 24), made),
        ):
            made = Traced()
            run(made)
            assert made.made
            for step in made.made.values():
                traced(step.blueprint)

    def test_what_a_graph_does_not_serve_is_eager(self, tiny: PreTrainedModel) -> None:
        traced = Traced()
        with attach(tiny, CacheConfig("h2o", 24)) as cache, compiled(tiny, cache, traced):
            tiny(torch.ones(2, 5, dtype=torch.int64), past_key_values=cache)
        with attach(tiny, CacheConfig("h2o", 32, kv_bits=4)) as cache, compiled(tiny, cache, traced):
            tiny.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=8, do_sample=False)
        with attach(tiny, CacheConfig("full")) as cache, compiled(tiny, cache, traced):
            tiny.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=8, do_sample=False)
        assert traced.runs == 0

    def test_the_model_is_given_back(self, tiny: PreTrainedModel) -> None:
        before = [dict(vars(module)) for module in tiny.modules()]
        with attach(tiny, CacheConfig("h2o", 24)) as cache, compiled(tiny, cache, Traced()):
            tiny(torch.ones(1, 5, dtype=torch.int64))
        assert [set(vars(module)) for module in tiny.modules()] == [set(own) for own in before]


class TestGraphs:
    def test_they_do_what_the_steps_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Real graphs, made by a process of their own and used by the next run, of a model with two groups a layer."""
        by_head = grouped_by_head(monkeypatch, [(HeadGroup((0, 2), 0.7), HeadGroup((1, 3), 1.3))], heads=4)
        config = CacheConfig("h2o", 24, chunk=8)
        eager = stream(by_head, config, None, 100)
        made = Artifacts(tmp_path)
        stream(by_head, config, made, 3)
        made.wait()
        assert made.trouble == ""
        assert len(list(tmp_path.glob("*.pt2"))) == 4, "for tokens, while windows shrink and after; chunks; the output"
        assert {path.suffix for path in tmp_path.iterdir()} <= {".pt2", ".log", ".lock"}, "nothing pickled has a name"
        artifacts_module._loaded.clear()
        found = Artifacts(tmp_path)
        same(eager, stream(by_head, config, found, 100))
        assert len(artifacts_module._loaded) == 4

    def test_a_damaged_graph_is_made_anew(self, tiny: PreTrainedModel, tmp_path: Path) -> None:
        traced = Traced()
        stream(tiny, CacheConfig("h2o", 24), traced, 2)
        for key in traced.made:
            (tmp_path / f"{key}.pt2").write_bytes(b"damaged")
        artifacts = Artifacts(tmp_path)
        artifacts.look = lambda: None  # type: ignore[method-assign]
        stream(tiny, CacheConfig("h2o", 24), artifacts, 2)
        assert set(artifacts._wanted) == set(traced.made)
        assert not list(tmp_path.glob("*.pt2"))

    def test_no_compiler_is_one_line(self, tiny: PreTrainedModel, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr("shutil.which", lambda name: None)
        without = Artifacts(tmp_path)
        stream(tiny, CacheConfig("h2o", 24), without)
        assert "no C++ compiler" in without.trouble
        assert "--no-compile" in without.trouble
        assert "\n" not in without.trouble

    @pytest.mark.parametrize("patient", [True, False])
    def test_whose_share_of_the_processor_a_compiler_gets(
        self, patient: bool, tiny: PreTrainedModel, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """Linux gives sessions equal parts: in its own, an idle compiler makes a chat five times slower."""
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\nsleep 60")
        compiler.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(compiler))
        artifacts = Artifacts(tmp_path)
        artifacts.patient = patient
        stream(tiny, CacheConfig("h2o", 24), artifacts, 2)
        artifacts._looked = 0.0
        artifacts.look()
        assert artifacts._building is not None
        keys, process = artifacts._building
        try:
            assert len(keys) == 2, "for the layers and for the output layer, by one process"
            assert (os.getsid(process.pid) == os.getsid(0)) is patient
            assert os.getpgid(process.pid) == process.pid, "Ctrl-C is not for it"
        finally:
            process.kill()
            process.wait()

    def test_a_failed_build_leaves_the_steps_eager(
        self, tiny: PreTrainedModel, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr("sys.executable", "false")
        failing = Artifacts(tmp_path)
        eager = stream(tiny, CacheConfig("h2o", 24), None)
        stream(tiny, CacheConfig("h2o", 24), failing, 2)
        failing.wait()
        same(eager, stream(tiny, CacheConfig("h2o", 24), failing))
        assert str(tmp_path) in failing.trouble
