"""What reaches native code: whatever torch is set to, it gets the numbers that it expects, or nothing."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaForCausalLM, PreTrainedModel

from h2o_stream import CacheConfig, H2OStreamError, attach
from h2o_stream.cache.tolerance import error_of
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import gather, pack, repack
from h2o_stream.native.pointers import pointer
from tests.fixtures import ids, make_llama, with_exhaustive
from tests.test_packed import packed_model
from tests.tolerance import assert_close

BFLOAT16 = 0.1
"""Rounding of bfloat16 models: the rms of differences, as a share of that of their logits."""


pytestmark = pytest.mark.usefixtures("in_use")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stream(model: PreTrainedModel, engine: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Any:
    """Logits of a prompt, of steps, of another chunk and of more steps; and what is kept."""
    tokens, parts = ids(40, rows=2), [12, 1, 1, 1, 9, *[1] * 16]
    with attach(model, CacheConfig(window=16, chunk=8), engine=engine) as cache:
        assert cache.engine_note.startswith("native" if engine == "auto" else "eager")
        with around():
            logits = [model(part, past_key_values=cache).logits for part in tokens.split(parts, 1)]
        return torch.cat(logits, 1), [cache.kept(layer) for layer in range(2)]


@pytest.fixture(params=with_exhaustive(["dense", "packed"], ["bfloat16"]))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "packed":
        return packed_model(MatrixKind.INT8)
    return make_llama().to(torch.bfloat16 if request.param == "bfloat16" else torch.float32)


def assert_as_close_as(dtype: torch.dtype, ours: Tensor, wanted: Tensor) -> None:
    if dtype == torch.float32:
        assert_close(ours, wanted)
    else:
        assert error_of(ours, wanted) < BFLOAT16


class TestPointer:
    @pytest.mark.parametrize("wrong", [
        torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.float64), torch.zeros(4, device="meta"),
        torch.zeros(3), torch.zeros(8)[::2], torch.zeros(2, 2).T[:, :1].expand(2, 2), torch.zeros(4).to_sparse(),
        torch.view_as_complex(torch.ones(4, 2)).conj().imag, torch.zeros(4).as_subclass(type("Other", (Tensor,), {})),
    ])  # fmt: skip
    def test_other_tensors_are_refused(self, wrong: Tensor) -> None:
        with pytest.raises(H2OStreamError, match=r"native code takes 4 numbers of float32"):
            pointer(wrong, "float32", 4)

    def test_what_is_expected(self) -> None:
        tensor = torch.zeros(2, 4)
        assert pointer(tensor, "float32", 8) == tensor.data_ptr()
        assert pointer(tensor[:, :2], "float32", 4, strided=True) == tensor.data_ptr()
        assert pointer(None, "float32", 8) == 0

    @pytest.mark.parametrize("wrong", [
        numpy.zeros(4), numpy.zeros(4, ">f4"), numpy.zeros(3, numpy.float32), numpy.zeros(8, numpy.float32)[::2],
        numpy.broadcast_to(numpy.float32(0), (4,)),
        numpy.zeros(4, numpy.float32).view(type("Other", (numpy.ndarray,), {})),
    ])  # fmt: skip
    def test_other_arrays_are_refused(self, wrong: Any) -> None:
        with pytest.raises(H2OStreamError, match=r"native code takes 4 numbers of float32"):
            pointer(wrong, "float32", 4)

    def test_arrays_of_numpy(self) -> None:
        array = numpy.zeros((2, 4), numpy.float32)
        assert pointer(array, "float32", 8) == array.ctypes.data
        assert pointer(array[:, 1:], "float32", 4, strided=True) == array.ctypes.data + 4
        bits = numpy.zeros(4, numpy.uint16)
        assert pointer(bits, "bfloat16", 4) == bits.ctypes.data

    def test_arrays_are_packed_like_tensors(self) -> None:
        weights, rows = torch.randn(20, 64), torch.tensor([3, 0, 19])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor = weights.to(dtype)
            array = tensor.view(torch.uint16).numpy() if dtype == torch.bfloat16 else tensor.numpy()
            packed = pack(array, MatrixKind.INT8)
            assert torch.from_numpy(packed).equal(pack(tensor, MatrixKind.INT8))
        expected = gather(pack(tensor, MatrixKind.INT8), MatrixKind.INT8, 20, 64, rows, "float32")
        found = gather(packed, MatrixKind.INT8, 20, 64, rows.numpy(), "float32")
        assert torch.from_numpy(found).equal(expected)

    def test_optimized_python_checks_too(self) -> None:
        code = (
            "import numpy; from h2o_stream.native.pointers import pointer; from h2o_stream import H2OStreamError\n"
            "try: pointer(numpy.zeros(4), 'int64', 4)\n"
            "except H2OStreamError: print('refused')"
        )
        done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "refused"

    def test_rows_that_do_not_exist(self) -> None:
        tiles = pack(torch.randn(20, 64), MatrixKind.INT8)
        for row in (-1, 20, 31):
            with pytest.raises(IndexError, match=f"token {row} is not one of 20"):
                gather(tiles, MatrixKind.INT8, 20, 64, torch.tensor([3, row]), "float32")
        with pytest.raises(H2OStreamError, match="numbers of int64"):
            gather(tiles, MatrixKind.INT8, 20, 64, torch.tensor([3], dtype=torch.int32), "float32")
        blocks = torch.zeros(20 * 2 * 34, dtype=torch.uint8)  # Q8_0: 34 bytes for 32 numbers
        with pytest.raises(IndexError, match="row 20 is not one of 20"):
            repack(blocks, 8, MatrixKind.INT8, 20, 64, order=torch.arange(1, 21))
        with pytest.raises(H2OStreamError, match="native code takes 1360 numbers"):
            repack(blocks[:-1], 8, MatrixKind.INT8, 20, 64)


class TestSettings:
    """Logits are those without the setting."""

    @pytest.mark.every(3)
    @pytest.mark.parametrize("dtype", with_exhaustive([torch.float64], [torch.bfloat16, torch.float16]))
    @pytest.mark.parametrize("engine", ["auto", "eager"])
    def test_the_default_dtype(self, model: PreTrainedModel, dtype: torch.dtype, engine: str) -> None:
        expected, kept = stream(model, engine)
        logits, found = stream(model, engine, lambda: default_dtype(dtype))
        assert logits.dtype == expected.dtype
        assert logits.equal(expected)
        assert all(map(torch.equal, found, kept))

    def test_a_model_is_attached_under_other_defaults(self) -> None:
        settings = [default_dtype(torch.bfloat16), default_dtype(torch.float64), torch.autocast("cpu")]
        for seed, setting in enumerate(settings, 1):
            model = make_llama(seed=seed)  # one that has not been verified yet
            with setting, attach(model, CacheConfig(window=16)) as cache:
                assert cache.engine_note.startswith("native"), cache.engine_note

    def test_another_thread_loads_a_model(self, tiny: LlamaForCausalLM) -> None:
        """`from_pretrained(dtype=bfloat16)` sets the default dtype of the whole process while it makes modules."""
        expected, _ = stream(tiny, "eager")
        stopping = threading.Event()

        def load() -> None:
            while not stopping.is_set():
                with default_dtype(torch.bfloat16):
                    torch.zeros(64)

        other = threading.Thread(target=load)
        other.start()
        try:
            for _ in range(3):
                with attach(tiny, CacheConfig(window=16, chunk=8)) as cache:
                    parts = ids(40, rows=2).split([12, 1, 1, 1, 9, *[1] * 16], 1)
                    logits = torch.cat([tiny(part, past_key_values=cache).logits for part in parts], 1)
                assert_close(logits, expected)
        finally:
            stopping.set()
            other.join()
            torch.set_default_dtype(torch.float32)

    @pytest.mark.every(2)
    def test_autocast(self, model: PreTrainedModel) -> None:
        """Around everything, and around a part of a stream: as exact as the eager route is under autocast."""
        exact, _ = stream(model, "eager")
        logits, _ = stream(model, "auto", lambda: torch.autocast("cpu", torch.bfloat16))
        assert logits.isfinite().all()
        assert error_of(logits, exact) < 3 * BFLOAT16
        tokens = ids(24)
        with attach(model, CacheConfig(window=16)) as cache:
            found = [model(tokens[:, :8], past_key_values=cache).logits]
            for start, stop in ((8, 12), (12, 13), (13, 14)):
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(model(tokens[:, start:stop], past_key_values=cache).logits)
            found += [model(part, past_key_values=cache).logits for part in tokens[:, 14:].split(1, 1)]
        with attach(model, CacheConfig(window=16), engine="eager") as cache:
            expected = [model(part, past_key_values=cache).logits for part in tokens.split([8, *[1] * 16], 1)]
        assert error_of(torch.cat([x.float() for x in found], 1), torch.cat(expected, 1)) < 3 * BFLOAT16

    @pytest.mark.parametrize("checked", [False, True])
    def test_logits_of_steps_have_the_dtype_of_those_of_prompts(
        self, model: PreTrainedModel, checked: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(library.CHECK_VARIABLE, "1" * checked)
        with attach(model, CacheConfig(window=16)) as cache:
            assert {model(part, past_key_values=cache).logits.dtype for part in ids(6).split([4, 1, 1], 1)} == {
                model.dtype
            }


class TestTokens:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_ids_of_either_kind(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        tokens = torch.tensor([[50, 0, 28, 0], [50, 23, 28, 25]])
        expected, dense = model(tokens).logits, type(model.get_input_embeddings()) is nn.Embedding
        assert model(tokens.to(dtype)).logits.equal(expected)
        with attach(model, CacheConfig(window=16)) as cache:
            found = [model(part.to(dtype), past_key_values=cache).logits for part in tokens.split([2, 1, 1], 1)]
        assert_as_close_as(model.dtype if dense else torch.bfloat16, torch.cat(found, 1), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
    def test_others_are_refused(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        with attach(model, CacheConfig(window=16)) as cache:
            model(ids(4), past_key_values=cache)
            with pytest.raises((TypeError, RuntimeError)):
                model(torch.ones(1, 1).to(dtype), past_key_values=cache)

    def test_views(self, model: PreTrainedModel) -> None:
        expected, _ = stream(model, "auto")
        with attach(model, CacheConfig(window=16, chunk=8)) as cache:
            wide = ids(40, rows=2).repeat_interleave(2, 1)
            starts = [0, 12, 13, 14, 15, *range(24, 41)]
            found = [model(wide[:, 2 * a : 2 * b : 2], past_key_values=cache).logits for a, b in pairwise(starts)]
        assert torch.cat(found, 1).equal(expected)


class TestChangedWeights:
    def test_functional_call(self) -> None:
        def logits(engine: str) -> Tensor:
            model, parts = make_llama(), ids(20).split([12, *[1] * 8], 1)
            doubled = {name: 2 * weight for name, weight in model.named_parameters() if "norm" not in name}
            with attach(model, CacheConfig(window=16), engine=engine) as cache:
                found = [model(part, past_key_values=cache).logits for part in parts[:4]]
                found.append(functional_call(model, doubled, (parts[4],), {"past_key_values": cache}).logits)
                found += [model(part, past_key_values=cache).logits for part in parts[5:]]
            return torch.cat(found, 1)

        assert_close(logits("auto"), logits("eager"))


def run_all(*actions: Callable[[], Any]) -> None:
    """Each in a thread of its own."""
    with ThreadPoolExecutor(len(actions)) as pool:
        for done in [pool.submit(action) for action in actions]:
            done.result()


class TestThreads:
    @pytest.mark.parametrize("policy", ["h2o", "full"])
    def test_a_second_one_is_refused(self, tiny: LlamaForCausalLM, policy: str) -> None:
        inside, go_on, errors = threading.Event(), threading.Event(), list[str]()

        def wait(*_: Any) -> None:
            inside.set()
            assert go_on.wait(60)

        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            hook = tiny.model.layers[1].register_forward_pre_hook(wait)
            first = threading.Thread(target=lambda: tiny(ids(10), past_key_values=cache))
            first.start()
            assert inside.wait(60)
            attempts: list[Callable[[], Any]] = [
                lambda: tiny(ids(1), past_key_values=cache), lambda: tiny(ids(3), use_cache=False),
                lambda: tiny.generate(ids(3), max_new_tokens=2), cache.reset, cache.state_dict,
                lambda: cache.load_state_dict({}), lambda: cache.reorder_cache(torch.tensor([0])),
                lambda: cache.pin(0, 1),
            ]  # fmt: skip
            for attempt in attempts:
                with pytest.raises(H2OStreamError, match="another thread is using this attached model") as error:
                    attempt()
                errors.append(str(error.value))
            go_on.set()
            first.join()
            hook.remove()
            assert cache.seen_tokens == 10
            tiny(ids(1), past_key_values=cache)
        assert all("\n" not in error for error in errors)

    def test_two_that_generate(self) -> None:
        """Each gets its reply or an error in one line."""
        model, expected = make_llama(), {}
        how = {"attention_mask": torch.ones(1, 12), "max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
        made: dict[int, list[Tensor]] = {0: [], 1: []}
        refused: list[str] = []
        with attach(model, CacheConfig(window=16)):
            for seed in made:
                expected[seed] = model.generate(ids(12, seed=seed), **how)

            def talk(seed: int) -> None:
                with torch.no_grad():
                    for _ in range(30):
                        try:
                            made[seed].append(model.generate(ids(12, seed=seed), **how))
                        except H2OStreamError as error:
                            refused.append(str(error))

            run_all(*(partial(talk, seed) for seed in made))
            assert model.generate(ids(12), **how).equal(expected[0])
        assert all(text.equal(expected[seed]) for seed in made for text in made[seed])
        assert all("another thread" in error or "newer one has replaced" in error for error in refused)

    def test_a_hook_that_calls_the_model(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(4), past_key_values=cache)
            hook = tiny.model.layers[1].register_forward_pre_hook(lambda *_: tiny(ids(1), past_key_values=cache))
            with pytest.raises(H2OStreamError, match="called by a hook"):
                tiny(ids(2), past_key_values=cache)
            hook.remove()


@pytest.mark.parametrize("policy", ["h2o", "full"])
@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps])
def test_no_copies_within_the_block(
    tiny: LlamaForCausalLM, policy: str, act: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights are copied before the refusal: a packed model of 135M parameters took 23 GB to refuse."""
    with attach(tiny, CacheConfig(policy, window=16)) as cache, monkeypatch.context() as patch:
        tiny(ids(4), past_key_values=cache)
        for kind, name in product((Tensor, nn.Parameter), ("__deepcopy__", "__reduce_ex__")):
            patch.setattr(kind, name, lambda *_: pytest.fail("a weight is copied"))
        for thing in (tiny, cache, tiny.forward):
            with pytest.raises(H2OStreamError, match="neither copied nor pickled"):
                act(thing)
        tiny(ids(1), past_key_values=cache)
    assert copy.deepcopy(tiny)(ids(4)).logits.equal(tiny(ids(4)).logits)


def test_a_model_that_shares_the_config(tiny: LlamaForCausalLM) -> None:
    other = LlamaForCausalLM(tiny.config).eval()
    with attach(tiny, CacheConfig(window=16)), pytest.raises(H2OStreamError, match="another model shares its config"):
        other(ids(3))
