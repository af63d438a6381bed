"""A cache that is given by its size in bytes, and the precision of weights that fits."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.attachment.attach import new_cache
from h2o_stream.attachment.support import layer_specs
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.sizing import sized
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.compare.catalog import NllOptions
from h2o_stream.config import AUTO_WINDOWS, SIZED_KV_BITS
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.models.fitting import WeightSizes, choose_precision
from h2o_stream.models.precision import device_of, weight_sizes
from h2o_stream.models.quantize import packed_bytes
from tests.fixtures import make_llama, thinned
from tests.test_oracle import tokens_of

LONG = torch.tensor([tokens_of(0, 200)])


def measured(model: Any, config: CacheConfig, step: int = 20) -> tuple[int, int]:
    """The window, and the most bytes that a stream takes which is much longer."""
    with attach(model, config) as cache:
        sizes = []
        for part in LONG.split(step, 1):
            model(part, past_key_values=cache)
            sizes.append(cache.nbytes)
        return cache.plan.window, max(sizes)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_llama(heads=4, groups=2, layers=3, context=256)


@pytest.mark.every(3)
@pytest.mark.parametrize(("policy", "kv_bits"), thinned(
    product(["h2o", "sink", "random", "snapkv", "expected-attention"], [None, 16, 4]),
    lambda policy, kv_bits: (policy, kv_bits) in (("h2o", None), ("sink", 4), ("snapkv", 16)),
))  # fmt: skip
def test_the_largest_window_that_fits(model: Any, policy: str, kv_bits: int | None) -> None:
    window, size = measured(model, CacheConfig(policy, window=60, kv_bits=kv_bits or SIZED_KV_BITS, chunk=8))
    assert window == 60
    assert measured(model, CacheConfig(policy, kv_bits=kv_bits, chunk=8, cache_size=size)) == (60, size)
    smaller, fewer = measured(model, CacheConfig(policy, kv_bits=kv_bits, chunk=8, cache_size=size - 1))
    assert smaller == 59
    assert fewer < size


@pytest.mark.parametrize("policy", ["h2o", "sink"])
def test_never_more_while_windows_change(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    def uneven(model: Any, specs: Any, progress: Any) -> Any:
        windows = (HeadWindow((0,), 0.4), HeadWindow((1,), 2.2), HeadWindow((2,), 0.4))
        return [replace(spec, windows=windows) for spec in specs]

    monkeypatch.setattr("h2o_stream.attachment.attach.give_retrieval_heads_more", uneven)
    model = make_llama(heads=3, groups=2, layers=3, context=256)
    window, largest = measured(model, CacheConfig(policy, chunk=8, cache_size=20_000, budgets="measured"), step=1)
    assert 18_000 < largest <= 20_000
    assert window < 100, "the stream is longer than the largest window"


def test_the_size_does_not_depend_on_the_dtype() -> None:
    sizes = [
        measured(
            make_llama(heads=4, groups=2, layers=3, context=256).to(dtype),
            CacheConfig("h2o", chunk=8, cache_size=100_000),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]
    (wide, wide_bytes), (narrow, narrow_bytes) = sizes
    assert max(wide_bytes, narrow_bytes) <= 100_000
    assert 0 <= narrow - wide <= 2


def test_no_more_than_the_context(model: Any) -> None:
    with attach(model, CacheConfig("h2o", cache_size=2**30, chunk=8)) as cache:
        assert cache.plan.window == 256 - 8


def test_too_small_a_size_is_refused(model: Any) -> None:
    message = r"cache_size is 1.0 KiB, but a window of 24 takes \d+\.\d KiB; raise --cache-size"
    with pytest.raises(ConfigError, match=message), attach(model, CacheConfig("h2o", chunk=8, cache_size=1024)):
        pass


@pytest.mark.parametrize(
    "wrong", [{"window": 64}, {"recent_ratio": 0.5}, {"policy": "full"}, {"cache_size": 0}, {"cache_size": "6MiB"}]
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cache_size is .*--cache-size"):
        CacheConfig(**{"cache_size": 2**20, **wrong})


def test_sizes_replace_windows(tmp_path: Any) -> None:
    options = NllOptions(text=(tmp_path,), policies=("h2o", "full", "sink"), cache_sizes=(2**20, 2**21))
    found = [(config.policy, config.cache_size) for config in options.configs]
    assert found == [("full", None), ("h2o", 2**20), ("sink", 2**20), ("h2o", 2**21), ("sink", 2**21)]


def slot_bytes(config: CacheConfig) -> int:
    """25,000 a slot in 16 bits."""
    return config.window * 25_000 * config.plan().kv_bits // 16


class TestByTheModel:
    """A window as large as a small part of the bytes that a step reads anyway."""

    @pytest.mark.parametrize(
        ("step_bytes", "free", "context", "queries", "window"),
        [
            (96e6, 16e9, 8192, 3, 448),  # the embedded model
            (60e6, 16e9, 8192, 3, 256),
            (500e6, 16e9, 32768, 4, 1536),
            (500e6, 16e9, 32768, 7, 768),
            (4.6e9, 16e9, 8192, 4, 3072),
            (4.6e9, 16e9, 1024, 4, 768),  # of which a chunk is not evicted yet
            (4.6e9, 0.2e9, 8192, 4, 768),  # little memory
            (1e6, 16e9, 8192, 1, 256),
        ],
    )
    def test_window(
        self, monkeypatch: pytest.MonkeyPatch, step_bytes: float, free: float, context: int, queries: int, window: int
    ) -> None:
        monkeypatch.setattr("h2o_stream.cache.sizing.free_bytes", lambda device: free)
        config = sized(
            CacheConfig(auto_window=1), context, slot_bytes, lambda: int(step_bytes),
            [None, HeadShape(2 * queries, 2, 64, 64)],
        )  # fmt: skip
        assert (config.window, config.auto_window) == (window, 1)

    def test_a_small_window_is_in_few_bits(self) -> None:
        config = CacheConfig(auto_window=1, window=512)
        assert [plan.kv_bits for plan in (config.plan(), config.grown_plan(900))] == [8, 8]
        assert replace(config, window=1024).plan().kv_bits == 16
        assert [replace(config, **given).plan().kv_bits for given in ({"kv_bits": 16}, {"auto_window": 0})] == [16, 16]
        assert sized(config, None, slot_bytes, lambda: 10**11, []) == config, "it was chosen before"

    def test_many_streams_share_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("h2o_stream.cache.sizing.free_bytes", lambda device: 16e9)
        windows = [
            sized(CacheConfig(auto_window=streams), None, slot_bytes, lambda: 10**11, []).window
            for streams in (1, 64, 1000)
        ]
        assert windows == [AUTO_WINDOWS[-1], 768, AUTO_WINDOWS[0]]

    @pytest.mark.parametrize(("device", "window"), [("auto", AUTO_WINDOWS[0]), ("cpu", AUTO_WINDOWS[-1])])
    def test_of_a_model_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch, device: Any, window: int) -> None:
        """What is free there limits it, unless the cache is on the host; pins, too."""
        gpu, model = torch.device("cuda:1"), make_llama(context=65536)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ({gpu: 1000}[device], 10**12))
        monkeypatch.setattr("h2o_stream.attachment.attach.input_device", lambda model: gpu)
        monkeypatch.setattr("h2o_stream.attachment.attach.weight_bytes", lambda model: 10**11)
        specs = [replace(spec, device=gpu) for spec in layer_specs(model, CacheConfig().plan())]
        cache = new_cache(model, CacheConfig(auto_window=1, device=device), specs, str)
        assert cache.plan.window == window
        with pytest.raises(OutOfMemoryError, match="1000 B of memory are free") if device == "auto" else nullcontext():
            cache.pin(0, window)

    def test_of_an_attached_model(self) -> None:
        with attach(make_llama(context=8192), CacheConfig(auto_window=1)) as cache:
            assert cache.plan.window == AUTO_WINDOWS[0]
        with attach(make_llama(context=8192, vocab=200_000), CacheConfig(auto_window=1)) as cache:
            assert cache.plan.window > AUTO_WINDOWS[0]


GIB = 2**30
SIZES = WeightSizes(float32=32 * GIB, int8=9 * GIB, int4=5 * GIB, largest=GIB)
WIDE = ("float32", "bfloat16")
NATIVE = ("bfloat16",)


@pytest.mark.parametrize(("free", "dtypes", "quantize", "dtype"), [
    (64, WIDE, "none", "float32"), (48, WIDE, "int8", "float32"), (48, NATIVE, "none", "bfloat16"),
    (24, NATIVE, "int8", "bfloat16"), (17, NATIVE, "int8", "bfloat16"), (16, NATIVE, "int4", "bfloat16"),
    (7, WIDE, "int4", "float32"),
])  # fmt: skip
def test_auto_takes_the_widest_that_is_comfortable(
    free: int, dtypes: tuple[str, ...], quantize: str, dtype: str
) -> None:
    chosen = choose_precision("m", SIZES, free * GIB, "auto", dtypes)
    assert (chosen.quantize, chosen.dtype) == (quantize, dtype)
    assert bool(chosen.reason) == (quantize != "none")
    assert "\n" not in chosen.reason


def test_the_reason_names_sizes_and_the_option() -> None:
    reason = choose_precision("meta/Llama", SIZES, 24 * GIB, "auto", NATIVE).reason
    for part in ("meta/Llama", "16.0 GiB", "24.0 GiB", "int8", "9.0 GiB", "--quantize"):
        assert part in reason


def test_unquantized_weights_are_not_widened_beyond_memory() -> None:
    assert choose_precision("m", SIZES, 40 * GIB, "none", WIDE).dtype == "float32"
    assert choose_precision("m", SIZES, 24 * GIB, "none", WIDE).dtype == "bfloat16"


@pytest.mark.parametrize(("quantize", "free", "hint"), [
    ("none", 12, "--quantize int4"),
    ("int8", 8, "--quantize int4"),
    ("int4", 4, "smaller --model"),
    ("auto", 4, "smaller --model"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_with_sizes(quantize: str, free: int, hint: str) -> None:
    with pytest.raises(OutOfMemoryError, match=hint) as error:
        choose_precision("m", SIZES, free * GIB, quantize, NATIVE)
    assert f"{free}.0 GiB are free" in str(error.value)
    assert "\n" not in str(error.value)


def test_without_the_library_nothing_is_packed() -> None:
    assert choose_precision("m", SIZES, 24 * GIB, "auto", NATIVE, can_pack=False).quantize == "none"
    with pytest.raises(OutOfMemoryError):
        choose_precision("m", SIZES, 12 * GIB, "auto", NATIVE, can_pack=False)


def test_sizes_are_those_of_the_packed_model() -> None:
    with torch.device("meta"):
        model = make_llama(heads=4, size=64, vocab=1000)
    sizes = weight_sizes(model)
    numbers = sum(weight.numel() for weight in model.parameters())
    assert sizes.float32 == 4 * numbers
    assert 1.06 * numbers < packed_bytes(model, "int8") < 1.2 * numbers
    assert sizes.int4 < sizes.int8 < sizes.float32


def test_auto_is_the_cpu_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert device_of("auto") == torch.device("cpu")
