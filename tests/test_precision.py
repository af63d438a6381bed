"""Precision of the weights: chosen by free memory or by the user, or refused before anything is read."""

import pytest
import torch

from h2o_stream.errors import OutOfMemoryError
from h2o_stream.models.fitting import WeightSizes, choose_precision
from h2o_stream.models.precision import device_of, weight_sizes
from h2o_stream.models.quantize import packed_bytes
from tests.fixtures import make_llama

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
