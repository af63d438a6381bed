"""Models described from their files and served without torch: the same numbers as through transformers."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest

from h2o_stream.attachment.describe import describe
from h2o_stream.cache.rotations import Rotations
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CacheConfig, ModelConfig, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import ConfigError
from h2o_stream.loading import loading
from h2o_stream.loading.loading import load_model, serves
from h2o_stream.loading.transformers_model import load
from h2o_stream.models import packed_cache
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.precision import allowed_dtypes
from h2o_stream.native import library
from h2o_stream.runtime import sources
from h2o_stream.runtime.measured import read_windows, shipped_digest
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.rotations import rope_frequencies
from h2o_stream.runtime.sources import ModelFile
from tests.descriptions import difference
from tests.family_models import TEXT, written
from tests.fixtures import with_exhaustive


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("runtime"), "Llama")


def through_both(file: Path, config: CacheConfig, dtype: str = "float32", **engine: Any) -> tuple[Engine, Engine]:
    """The model of a file behind transformers, and without torch."""
    loaded = load(ModelConfig(str(file), dtype=dtype))
    theirs = Engine(loaded.model, loaded.tokenizer, config, **engine)
    found = load_model(ModelConfig(str(file), dtype=dtype), config, "auto", print, print)
    assert isinstance(found.model, RuntimeModel), found.why_transformers
    return theirs, Engine(found.model, found.tokenizer, config, **engine)


def compare(theirs: Engine, ours: Engine, ends: Sequence[int], largest: float) -> None:
    """Feed the tokens up to each of the ends; logits may be off by so much, and what is kept is as much."""
    for start, end in pairwise((0, *ends)):
        expected, found = (engine.served.forward(TEXT[start:end]) for engine in (theirs, ours))
        numpy.testing.assert_allclose(found, expected, rtol=0, atol=largest)
    assert ours.counts == theirs.counts


def keep_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights of small models are kept, too, in a cache in this folder."""
    monkeypatch.setattr(packed_cache, "cache_folder", lambda: folder / "cache")
    monkeypatch.setattr(sources, "MIN_BYTES", 0)
    monkeypatch.setattr(sources, "MIN_GGUF_BYTES", 0)


def test_caches_share_a_table_of_rotations() -> None:
    """They keep the one that they have: it may not grow with each of them."""
    rotations = Rotations(rope_frequencies(10_000, 8))
    tables = [rotations.on_cpu(limit) for limit in range(600, 700)]
    assert all(table is tables[0] for table in tables)
    assert len(rotations.on_cpu(1025)) >= 1025


class TestDescription:
    def test_what_differs_is_found(self, file: Path) -> None:
        source = ModelFile(str(file), file, "float32")
        described = source.describe(print)
        again = source.describe(print)
        layer = again.layers[1]
        swapped = replace(layer, mlp=replace(layer.mlp, gate=layer.mlp.up, up=layer.mlp.gate))
        other = replace(again, layers=[again.layers[0], swapped])
        assert "gate of mlp of 1 of layers" in difference(described, other)
        norm = replace(again.norm, weight=again.norm.weight * 1.001)
        assert "weight of norm" in difference(described, replace(again, norm=norm))
        assert "epsilon" in difference(described, replace(again, norm=replace(again.norm, epsilon=1e-5)))
        assert difference(described, again) == ""

    def test_experts_that_differ_are_found(self, tmp_path: Path) -> None:
        path = written(tmp_path, "Qwen 3 MoE")
        described = ModelFile(str(path), path, "float32").describe(print)
        model = load(ModelConfig(str(path), dtype="float32")).model
        last = model.model.layers[1].mlp
        last.experts.down_proj.tiles[6:8] = last.experts.down_proj.tiles[4:6]
        assert "down of mlp of 1 of layers" in difference(described, describe(model))
        model.config.norm_topk_prob = False
        assert "normalized of router of mlp of 0 of layers" in difference(described, describe(model))


CONFIGS = {
    "h2o": CacheConfig(window=40, chunk=16),
    "equal windows": CacheConfig(window=40, chunk=16, budgets="equal"),
    "h2o-paper": CacheConfig("h2o-paper", window=40, chunk=16),
    "tova": CacheConfig("tova", window=40, chunk=16),
    "random": CacheConfig("random", window=40, chunk=16, seed=3),
    "sink": CacheConfig("sink", window=40, chunk=16),
    "8 bits": CacheConfig(window=40, chunk=16, kv_bits=8),
    "4 bits": CacheConfig(window=48, chunk=16, kv_bits=4),
    "absolute": CacheConfig("recent", window=40, chunk=16, positions="absolute"),
    "rolling": CacheConfig(window=40, chunk=16, positions="rolling"),
    "ratios": CacheConfig(heavy_ratio=0.1, recent_ratio=0.1, chunk=16),
    "bytes": CacheConfig(cache_size=30_000, chunk=16),
    "at once": CacheConfig(window=40, chunk=0),
}


class TestStream:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    def test_the_same_numbers(self, file: Path, config: CacheConfig) -> None:
        theirs, ours = through_both(file, config)
        with theirs, ours:
            # A key halfway between two levels may be rounded either way.
            rounding = 2e-3 if theirs.cache.plan.kv_bits >= 8 else 0.1
            for engine in (theirs, ours):
                engine.pin(5)
            assert ours.cache.plan == theirs.cache.plan
            compare(theirs, ours, (100, 101, 200, 201, 202), rounding)
            ours.cache.evict_first(150, 160)
            theirs.cache.evict_first(150, 160)
            for token in TEXT[202:290]:
                expected, found = theirs.served.forward([token]), ours.served.forward([token])
            numpy.testing.assert_allclose(found, expected, rtol=0, atol=rounding)
            states = [engine.served.state_dict() for engine in (theirs, ours)]
        assert states[0].keys() == states[1].keys()
        for name, array in states[0].items():
            if name in ("checksums", "fingerprint"):  # the model is called otherwise
                continue
            assert (array.dtype, array.shape) == (states[1][name].dtype, states[1][name].shape), name
            if name.endswith("index"):
                numpy.testing.assert_array_equal(numpy.sort(array), numpy.sort(states[1][name]))

    @pytest.mark.parametrize("kv_bits", [16, 8])
    def test_states_go_from_one_to_the_other(self, file: Path, kv_bits: int) -> None:
        theirs, ours = through_both(file, CacheConfig(window=40, chunk=16, kv_bits=kv_bits))
        with theirs, ours:
            for engine, other in ((theirs, ours), (ours, theirs)):
                engine.reset()
                list(engine.prefill(TEXT[:120]))
                other.load_state_dict(engine.state_dict())
                assert other.tokens == engine.tokens
                expected, found = (each.served.forward(TEXT[120:150]) for each in (engine, other))
                numpy.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)

    def test_the_same_seed_gives_the_same_text(self, file: Path) -> None:
        config = CacheConfig(window=40, chunk=16)
        theirs, ours = through_both(file, config, sampling=SamplingConfig(temperature=0.8, seed=5, max_tokens=60))
        with theirs, ours:
            for engine in (theirs, ours):
                engine.end_tokens = frozenset()
                list(engine.prefill(TEXT[:30]))
                list(engine.decode())
            assert ours.tokens == theirs.tokens

    def test_embeddings(self, file: Path) -> None:
        theirs, ours = through_both(file, CacheConfig(window=40))
        with theirs, ours:
            ids = numpy.array([[3, 0], [60, 0], [3, 0]])[:, 0]
            numpy.testing.assert_allclose(
                ours.served.read_embeddings(ids), theirs.served.read_embeddings(ids), rtol=0, atol=1e-6
            )

    def test_errors(self, file: Path) -> None:
        theirs, ours = through_both(file, CacheConfig(window=40))
        with theirs, ours:
            with pytest.raises(Exception, match="no such token"):
                ours.served.forward([64])
            assert not ours.cache.torn
            ours.reset()
            with pytest.raises(ConfigError, match="pinned tokens"):
                ours.pin(ours.context)
            ours.pin(4)
            list(ours.prefill(TEXT[:100]))
            with pytest.raises(Exception, match="have been evicted"):
                ours.cache.pin(20, 25)


class TestLoading:
    @pytest.mark.parametrize(
        "settings",
        [
            {"engine": "eager"},
            {"model": {"quantize": "none"}},
            {"model": {"dtype": "float16"}},
            {"cache": {"policy": "full"}},
        ],
    )
    def test_what_needs_torch(self, file: Path, settings: dict[str, Any]) -> None:
        through_both(file, CacheConfig())
        config = ModelConfig(str(file), **{"dtype": "float32", **settings.get("model", {})})
        cache = CacheConfig(**settings.get("cache", {}))
        loaded = load_model(config, cache, settings.get("engine", "auto"), print, print)
        assert not isinstance(loaded.model, RuntimeModel)

    def test_another_cache_may_need_torch(self, file: Path) -> None:
        _, ours = through_both(file, CacheConfig())
        loaded = LoadedModel("x", ours.model, ours.tokenizer)
        assert serves(loaded, CacheConfig("tova"))
        assert not serves(loaded, CacheConfig("full"))
        assert not serves(loaded, CacheConfig("snapkv"))

    @pytest.mark.parametrize("name", ["auto", "float32", "bfloat16"])
    def test_the_dtype_is_the_one_that_torch_would_take(self, name: str) -> None:
        assert loading._dtype(name) == allowed_dtypes(name)[0]

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("dtype", with_exhaustive(["float32"], ["bfloat16"]))
    def test_the_embedded_model_ships_as_it_is(self, embedded_file: Path, dtype: str) -> None:
        """What is known of it is what is found out about it here."""
        assert shipped_digest(embedded_file, dtype)
        loaded = load(ModelConfig(dtype=dtype))
        with Engine(loaded.model, loaded.tokenizer, CacheConfig()) as engine:
            assert engine.cache.engine_note == f"native, {library.name()}"
            source = ModelFile(loaded.name, embedded_file, dtype)
            assert difference(source.describe(print), engine.served.native_model.description) == ""  # type: ignore[attr-defined]
            assert engine.cache.model_digest() == shipped_digest(embedded_file, dtype)  # type: ignore[union-attr]
            measured = numpy.array([shares(spec.windows) for spec in engine.cache.specs])  # type: ignore[union-attr]
            shipped = numpy.array([shares(windows) for windows in read_windows(embedded_file, dtype)])
            assert abs(measured - shipped).mean() < 0.05, "other instruction sets round otherwise"
            assert numpy.corrcoef(measured.ravel(), shipped.ravel())[0, 1] > 0.98


def shares(windows: Sequence[HeadWindow]) -> list[float]:
    """The share of every head of a layer."""
    return [share for _, share in sorted((head, window.share) for window in windows for head in window.heads)]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize(
    ("command", "arguments", "typed"),
    [
        (
            "chat",
            ["--window", "48", "--chunk", "8", "--session", "s", "-n", "8"],
            "I am Ada.\nTell me about bees.\nWho am I?\n/recall\n",
        ),
        ("stream", ["--turns", "1", "-n", "8"], ""),
        ("compare", ["nll", "--text", str(Path(__file__)), "--tokens", "40", "--policies", "full,h2o"], ""),
    ],
)
def test_commands_import_no_torch(command: str, arguments: list[str], typed: str) -> None:
    """Recall, which reads embeddings, and sessions among them."""
    code = f"""
import sys
from h2o_stream.cli import {command}
sys.argv = ["h2o-{command}", *{arguments}, "-q"]
try:
    {command}.main()
except SystemExit as left:
    assert not left.code, left.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
