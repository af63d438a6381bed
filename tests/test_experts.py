"""Packed experts in the native library, against transformers; sizes that do not fit are refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy
import pytest
import torch

from h2o_stream.attachment.describe import describe
from h2o_stream.config import CacheConfig
from h2o_stream.native import packing, stepper
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import Description, DescriptionError, Matrix
from h2o_stream.native.experts import Experts
from h2o_stream.native.pointers import Array
from h2o_stream.runtime.model import RuntimeModel, ServedRuntime
from tests.families import GROUPED, nudged, tiny
from tests.fixtures import thinned
from tests.native_builds import needs_library
from tests.packed_tiles import KINDS, numbers, random_tiles
from tests.tolerance import relative_error

pytestmark = [
    needs_library,
    pytest.mark.usefixtures("dense_too"),
]

TOKENS = [number * 7 % 61 + 3 for number in range(40)]

MODELS = {
    "softmax": ("Qwen3Moe", {}),
    "with an expert for all": ("Qwen2Moe", {"shared_expert_intermediate_size": 64}),
    "sigmoid": ("Glm4Moe", {"n_routed_experts": 6, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}),
}


def packed(kind: MatrixKind, rows: int, columns: int, seed: int) -> Matrix:
    return Matrix(random_tiles(kind, rows, columns, seed), None, rows, columns, kind)


@functools.cache
def described(name: str, kind: MatrixKind, inner: int, hidden: int, count: int = 6) -> tuple[Description, Any]:
    """A model with packed experts, of which each token goes through 3; and transformers' model of the same numbers."""
    model, settings = MODELS[name]
    sizes = {**GROUPED, "hidden_size": hidden, "moe_intermediate_size": inner, "num_experts_per_tok": 3}
    counts = {"num_experts": count, "num_local_experts": count}
    dense = nudged(tiny(model, **{**sizes, **counts, **settings})())
    description = describe(dense)
    for number, (layer, module) in enumerate(zip(description.layers, dense.model.layers, strict=True)):
        if isinstance(layer.mlp, Experts):
            gate, up = (packed(kind, count * inner, hidden, number + 10 * part) for part in range(2))
            down = packed(kind, count * hidden, inner, number + 20)
            description.layers[number] = replace(
                layer, mlp=replace(layer.mlp, gate=gate, up=up, down=down, stride=inner)
            )
            gate_and_up = [numbers_of(matrix).view(count, inner, hidden) for matrix in (gate, up)]
            module.mlp.experts.gate_up_proj.data.copy_(torch.cat(gate_and_up, 1))
            module.mlp.experts.down_proj.data.copy_(numbers_of(down).view(count, hidden, inner))
    return description, dense


def numbers_of(matrix: Matrix) -> torch.Tensor:
    return numbers(matrix.weights, matrix.kind, matrix.rows, matrix.columns)


def with_arrays(value: Any) -> Any:
    """A description as the runtime has it: its tensors are arrays."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, list):
        return [*map(with_arrays, value)]
    if is_dataclass(value):
        return replace(value, **{field.name: with_arrays(getattr(value, field.name)) for field in fields(value)})
    return value


def served(description: Description, threads: int = 1, window: int = 64) -> ServedRuntime:
    longest, layers = 2 * window, len(description.layers)
    model = RuntimeModel(with_arrays(description), (), "x", str, longest, longest, [None] * layers, None)
    served = model.serve(CacheConfig("recent", window=window))
    served.stepper._most_threads = threads
    return served


def fed(served: ServedRuntime, parts: Sequence[int]) -> Array:
    """Logits after each part of the tokens, whose lengths are given."""
    ends = numpy.cumsum(parts)
    return numpy.stack([served.forward(TOKENS[end - part : end]) for part, end in zip(parts, ends, strict=True)])


SIZES = [(kind, inner, 64) for kind in (MatrixKind.INT8, MatrixKind.INT4) for inner in (32, 96)]
SIZES += [(kind, 256, 256) for kind in KINDS]


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "kind", "inner", "hidden"), thinned(
    [(name, *size) for name in MODELS for size in SIZES],
    lambda name, *size: (2 * list(MODELS).index(name) + SIZES.index(size)) % 5 == 0,
))  # fmt: skip
def test_steps_and_prompts(name: str, kind: MatrixKind, inner: int, hidden: int) -> None:
    (description, model), parts = described(name, kind, inner, hidden), [30, 1, 1, 6, 1, 1]
    expected = model(torch.tensor([TOKENS])).logits[0, numpy.cumsum(parts) - 1]
    assert relative_error(torch.from_numpy(fed(served(description), parts)), expected) < 5e-3


@pytest.mark.every(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inner", [32, 96])
def test_results_do_not_depend_on_the_number_of_threads(name: str, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    description, _ = described(name, MatrixKind.INT8, inner, 64)
    results = []
    for threads in (1, 2, 3, 5):
        monkeypatch.setattr(stepper, "num_threads", lambda threads=threads: threads)
        results.append(fed(served(description, threads), [30, 1, 1, 6, 1, 1]))
    assert all(numpy.array_equal(result, results[0]) for result in results)


def test_many_experts_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take whole experts, and there is no room for the tokens of all experts at a time."""
    (description, model), tokens, results = described("softmax", MatrixKind.INT8, 32, 64, 48), TOKENS * 15, []
    expected = model(torch.tensor([tokens])).logits[0, -1]
    for threads in (1, 2, 5):
        monkeypatch.setattr(stepper, "num_threads", lambda threads=threads: threads)
        results.append(served(description, threads, 640).forward(tokens))
    assert relative_error(torch.from_numpy(results[0]), expected) < 5e-3
    assert all(numpy.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize(("change", "reason"), [
    ({"inner_size": 48}, "gate of 6 experts"), ({"stride": 64}, "gate of 6 experts"),
    ({"down": packed(MatrixKind.INT8, 6 * 32, 32, 0)}, "down of 6 experts"),
])  # fmt: skip
def test_sizes_that_do_not_fit(change: dict[str, Any], reason: str) -> None:
    experts = described("softmax", MatrixKind.INT8, 32, 64)[0].layers[0].mlp
    with pytest.raises(DescriptionError, match=reason):
        replace(experts, **change)
    with pytest.raises(DescriptionError, match="go through 7 of 6"):
        replace(experts, router=replace(experts.router, chosen=7))


def test_a_step_reads_each_weight_of_the_chosen_experts_once() -> None:
    """Also where the gates of an expert stand in one matrix with the rest of it."""
    apart, both = described("softmax", MatrixKind.INT8, 32, 64)[0].layers[0].mlp, packed(MatrixKind.INT8, 6 * 64, 64, 0)
    gate, up = (both.row_range(first, 5 * 64 + 32) for first in (0, 32))
    fused = replace(apart, gate=gate, up=up, stride=64)
    of_one = 2 * packing.packed_bytes(MatrixKind.INT8, 32, 64) + packing.packed_bytes(MatrixKind.INT8, 64, 32)
    assert fused.nbytes == apart.nbytes == 3 * of_one


def test_experts_within_a_tile() -> None:
    experts = described("softmax", MatrixKind.INT8, 32, 64)[0].layers[0].mlp
    gate, down = packed(MatrixKind.INT8, 6 * 8, 64, 0), replace(experts.down, columns=8)
    with pytest.raises(DescriptionError, match="multiple of 16"):
        replace(experts, gate=gate, up=gate, down=down, inner_size=8, stride=8)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_router_whose_best_experts_have_all_the_weight(normalized: bool) -> None:
    """In bfloat16 the weights of a token's experts add up to 1 then, normalized or not, for most inputs."""
    sizes = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny("Qwen3Moe", **sizes, norm_topk_prob=normalized)()
    for layer in model.model.layers:
        layer.mlp.gate.weight.data *= 40
    layers = describe(model.bfloat16()).layers
    assert [layer.mlp.router.normalized for layer in layers] == [normalized] * len(layers)
