"""The library of our own: its operations against the same in float64, and how it is compiled."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from h2o_stream.cache.weigh import Arrivals, Products, Turns, weigh
from h2o_stream.graphs.build import compile_ahead
from h2o_stream.models.quantize import Int4Linear, Int8Linear, Native4Linear, Native8Linear, quantize
from h2o_stream.native import library
from h2o_stream.native.ops import GROUP, unpacked
from tests.conftest import make_llama
from tests.tolerance import FLOAT32, assert_close, rms

MACHINES = {
    "this one": library.FLAGS,
    "with AVX2": [*library.FLAGS, "-mno-avx512f"],
    "any": [flag for flag in library.FLAGS if flag != "-march=native"],
}


@pytest.fixture(params=MACHINES)
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled for other machines: with fewer instructions and narrower registers."""
    if request.param != "this one":
        if platform.machine() != "x86_64":
            pytest.skip("these flags are of x86")
        monkeypatch.setattr(library, "FLAGS", MACHINES[request.param])
        monkeypatch.setattr(library, "loaded", cache(library.loaded.__wrapped__))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestFewVectors:
    @pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 19])
    @pytest.mark.parametrize(("rows", "columns"), [(3, 5), (37, 96), (8, 576), (9, 77)])
    def test_products(self, count: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        x, matrix = torch.randn(count, columns).to(dtype), torch.randn(rows, columns).to(dtype)
        for threads in (1, 3):
            y = torch.ops.h2o_stream.multiply_few(x, matrix, threads)
            wanted = x.double() @ matrix.double().T
            torch.testing.assert_close(y.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=FLOAT32 * rms(wanted))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestWeighOne:
    @pytest.mark.parametrize(
        ("batch", "kv_heads", "groups", "places", "size", "turned"),
        [
            (1, 3, 3, 257, 64, 64),
            (1, 1, 1, 1, 8, 8),
            (2, 1, 11, 19, 24, 12),
            (5, 2, 2, 33, 128, 128),
            (1, 2, 4, 40, 80, 32),
            (3, 4, 1, 130, 20, 0),
        ],
    )
    @pytest.mark.parametrize("covered", [False, True])
    def test_it_is_weigh(
        self, batch: int, kv_heads: int, groups: int, places: int, size: int, turned: int, covered: bool, dtype: Any
    ) -> None:
        torch.manual_seed(0)
        query, keys, values = (
            torch.randn(batch, heads, length, wide).to(dtype)
            for heads, length, wide in (
                (kv_heads * groups, 1, size),
                (kv_heads, places, size),
                (kv_heads, places, size + 4),
            )
        )
        table, behind = torch.randn(50, turned).to(dtype), torch.randint(0, 50, (batch, kv_heads, places))
        hidden = torch.rand(batch, kv_heads, 1, places) < 0.4
        hidden[..., -1] = False
        turns, seen = Turns(table, behind) if turned else None, hidden if covered else None
        products = Products(0.3, 20.0 if covered else None)
        exact = None if turns is None else Turns(table.double(), behind)
        arrivals = Arrivals((1,) * batch, 1, query.device)
        asked = [x.double() for x in (query, keys, values)]
        output, probs = weigh(*asked, exact, arrivals, seen, products)
        for threads in (1, 2, 3):
            own = torch.ops.h2o_stream.weigh_one(
                query, keys, values, *(turns or (None, None)), seen, products.scaling, products.softcap or 0.0, threads
            )
            assert own[0].dtype == dtype
            assert own[0].shape == output.shape
            assert own[1].shape == probs.shape
            assert_close(own[1], probs)
            rounding = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(own[0].double(), output, rtol=rounding, atol=FLOAT32 * rms(output))

    def test_large_and_small_products(self, dtype: torch.dtype) -> None:
        """The softmax of what differs by more than float32 can tell is one and zeros."""
        query = torch.full((1, 1, 1, 8), 30.0).to(dtype)
        keys = torch.zeros(1, 1, 40, 8).to(dtype)
        keys[..., 20, :], keys[..., 21, :] = 30.0, -30.0
        output, probs = torch.ops.h2o_stream.weigh_one(query, keys, keys, None, None, None, 1.0, 0.0, 2)
        assert probs.flatten().tolist() == [0.0] * 20 + [1.0] + [0.0] * 19
        assert output.flatten().tolist() == [30.0] * 8


class TestPacked:
    @pytest.mark.parametrize("packed", [Native8Linear, Native4Linear])
    @pytest.mark.parametrize("columns", [32, 96, 1056])
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.usefixtures("anywhere")
    def test_products(self, packed: type[Native8Linear | Native4Linear], columns: int, threads: int) -> None:
        torch.manual_seed(0)
        layer = packed(nn.Linear(columns, 37, bias=False))
        matrix = unpacked(layer.codes, layer.grid, torch.float32).double()
        x = torch.randn(5, columns) * torch.tensor([[1.0], [1e-6], [1e6], [0.0], [3.0]])
        groups = x.double().unflatten(1, (-1, GROUP))
        steps = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        rounded = ((groups / steps).round() * steps).flatten(1)
        y = torch.ops.h2o_stream.multiply_packed(x, layer.codes, layer.grid, threads)
        torch.testing.assert_close(y.double(), rounded @ matrix.T, rtol=1e-4, atol=1e-5 * float(x[4].norm()))
        assert not y[3].any()
        one = torch.ops.h2o_stream.multiply_packed(x[2:3], layer.codes, layer.grid, threads)
        assert one.equal(y[2:3]), "a vector gives the same alone"

    @pytest.mark.parametrize("packed", [Native8Linear, Native4Linear])
    def test_grids_of_gguf_files_are_held_as_they_are(self, packed: type[Native8Linear | Native4Linear]) -> None:
        torch.manual_seed(0)
        scale, offset = (torch.rand(8, 3, 1) * 0.01).half().float(), -torch.rand(8, 3, 1).half().float()
        if packed is Native4Linear:
            codes = torch.randint(0, 16, (8, 3, 32))
            codes[..., 3], codes[..., 20] = 0, 15
        else:
            codes = torch.randint(-127, 128, (8, 3, 32))
            codes[..., 7], offset = 127, torch.zeros_like(offset)
        linear = nn.Linear(96, 8, bias=False)
        linear.weight.data = (codes * scale + offset).flatten(1)
        layer = packed(linear)
        torch.testing.assert_close(
            unpacked(layer.codes, layer.grid, torch.float32), linear.weight.data, rtol=1e-6, atol=1e-8
        )

    def test_small_and_empty_groups(self) -> None:
        for number in (0.0, 1e-7, -3.0):
            linear = nn.Linear(64, 4, bias=False)
            linear.weight.data = torch.full((4, 64), number)
            for packed in (Native8Linear, Native4Linear):
                layer = packed(linear)
                given = unpacked(layer.codes, layer.grid, torch.float32)
                torch.testing.assert_close(given, linear.weight.data, rtol=2e-3, atol=1e-7)

    @pytest.mark.parametrize("packed", [Native8Linear, Native4Linear])
    def test_a_compiled_graph_calls_it(self, packed: type[Native8Linear | Native4Linear], tmp_path: Path) -> None:
        layer, x = packed(nn.Linear(64, 24)), torch.randn(1, 1, 64)
        with torch.no_grad():
            compile_ahead(torch.export.export(layer, (x,), strict=False), tmp_path / "layer.pt2", {})
            run = torch._C._aoti.AOTIModelPackageLoader(str(tmp_path / "layer.pt2"), "model", True, 1, -1).boxed_run
            torch.testing.assert_close(run([x])[0], layer(x))


class TestCompiling:
    def test_without_a_compiler_the_kernels_are_torchs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(library, "loaded", library.loaded.__wrapped__)
        monkeypatch.setattr("shutil.which", lambda name: None)
        told: list[str] = []
        model = make_llama(heads=2, groups=2, size=8)
        quantize(model, "int4", told.append)
        assert {type(module) for module in model.modules()} >= {Int4Linear, Int8Linear}
        assert len(told) == 1
        assert "g++" in told[0]

    def test_a_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        failing = tmp_path / "g++"
        failing.write_text("#!/bin/sh\nexit 1\n")
        failing.chmod(0o755)
        monkeypatch.setenv("CXX", str(failing))
        assert library.loaded.__wrapped__() is None

    def test_it_is_compiled_once(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
        assert library.loaded.__wrapped__() is not None
        made = list((tmp_path / "native").iterdir())
        assert [path.suffix for path in made] == [".so"]
        monkeypatch.setattr("subprocess.run", None)
        assert library.loaded.__wrapped__() is not None
