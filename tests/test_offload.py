"""Models larger than the device, and caches in host memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from h2o_stream.cache.attach import attach
from h2o_stream.cache.attention_interface import h2o_attention
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.models.load import load
from tests.test_cli import BIN, invoke

IDS = torch.tensor([[1, 7, 9, 4, 11, 30, 6, 5, 17, 8, 3, 21] * 4])


@pytest.mark.parametrize("policy", ["full", "h2o", "sink"])
def test_weights_on_disk_give_the_same_output_as_in_memory(tiny_folder: Path, policy: str) -> None:
    inside = load(ModelConfig(str(tiny_folder), dtype="float32", device="cpu")).model
    outside = load(ModelConfig(str(tiny_folder), dtype="float32", device_map="auto", max_memory="cpu=1MB")).model
    assert "disk" in outside.hf_device_map.values()
    generated = []
    for model in (inside, outside):
        with attach(model, CacheConfig(policy, 16)) as cache:
            generated.append(model.generate(IDS, max_new_tokens=12, min_new_tokens=12, do_sample=False).tolist())
            held = cache.nbytes
    assert generated[0] == generated[1]
    assert held > 0


@pytest.mark.parametrize("policy", ["h2o", "recent", "tova"])
def test_a_cache_in_host_memory_of_a_model_elsewhere(policy: str) -> None:
    """Fake tensors have no data but track devices, and refuse to be mixed across devices like real ones."""
    with FakeTensorMode():
        config = CacheConfig(policy, 16, positions="absolute", budgets="equal", device="cpu")
        cache = H2OCache(config, [LayerSpec(device=torch.device("cuda"))], None)
        for new in (5, 1, 30, 1, 1):
            query = torch.empty(1, 4, new, 8, device="cuda")
            key = torch.empty(1, 2, new, 8, device="cuda")
            mixed, _ = h2o_attention(SimpleNamespace(layer_idx=0), query, key, key, None, h2o_cache=cache)  # type: ignore[arg-type]
            assert mixed.device.type == "cuda"
            assert cache.head_groups[0].store.keys.device.type == "cpu"  # type: ignore[union-attr]


def test_host_memory_changes_nothing_where_layers_compute_there(tiny_folder: Path) -> None:
    model = load(ModelConfig(str(tiny_folder), dtype="float32", device="cpu")).model
    generated = []
    for device in ("auto", "cpu"):
        with attach(model, CacheConfig("h2o", 16, device=device)):  # type: ignore[arg-type]
            generated.append(model.generate(IDS, max_new_tokens=12, do_sample=False).tolist())
    assert generated[0] == generated[1]


def test_zero_inference_gives_the_same_output_as_weights_in_memory(tiny_folder: Path) -> None:
    pytest.importorskip("deepspeed")
    base = ["h2o-chat", "-m", str(tiny_folder), "-p", "hello", "-n", "8", "--temp", "0", "--dtype", "float32", "-q"]
    inside, outside = (
        subprocess.run([BIN / base[0], *base[1:], *more], capture_output=True, text=True, check=True, timeout=300)
        for more in ([], ["--zero"])
    )
    assert outside.stdout.splitlines()[-1] == inside.stdout.splitlines()[-1]


def test_zero_inference_without_deepspeed_is_one_line(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, os.environ.get(name, "0" if "RANK" in name else "1"))
    done = invoke("h2o-chat", "-m", tiny_folder, "-p", "hello", "--zero", "-q")
    assert done.exit_code == 1
    assert "h2o-stream[zero]" in done.stderr


class TestOptions:
    @pytest.mark.parametrize("text", ["10GiB", "cpu:10GiB", "gpu=1GiB", "0=ten", "cpu=5", "0=1GiB,,"])
    def test_invalid_memory_sizes(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--max-memory takes them like 0=10GiB,cpu=24GiB"):
            ModelConfig(device_map="auto", max_memory=text)

    def test_memory_by_device(self) -> None:
        config = ModelConfig(device_map="auto", max_memory="0=10GiB, cpu=1.5GB")
        assert config.memory_by_device() == {0: "10GiB", "cpu": "1.5GB"}

    def test_memory_without_a_map(self) -> None:
        with pytest.raises(ConfigError, match="needs --device-map auto"):
            ModelConfig(max_memory="cpu=1GiB")

    def test_an_unknown_device_of_the_cache(self) -> None:
        with pytest.raises(ConfigError, match="--cache-device takes one of auto, cpu"):
            CacheConfig(device="disk")  # type: ignore[arg-type]

    def test_in_the_shell(self, tiny_folder: Path) -> None:
        base = ["-m", tiny_folder, "-p", "hello", "-n", "4", "--temp", "0", "-q", "--dtype", "float32"]
        inside = invoke("h2o-chat", *base)
        outside = invoke("h2o-chat", *base, "--device-map", "auto", "--max-memory", "cpu=1MB", "--cache-device", "cpu")
        assert outside.exit_code == 0, outside.stderr
        assert outside.stdout == inside.stdout


def test_weights_on_disk_are_part_of_what_a_model_is(tiny_folder: Path, tmp_path: Path) -> None:
    inside = load(ModelConfig(str(tiny_folder), dtype="float32", device="cpu")).model
    shutil.copytree(tiny_folder, tmp_path / "tuned")
    with torch.no_grad():
        inside.model.layers[1].mlp.up_proj.weight[3, 5] += 1
    inside.save_pretrained(tmp_path / "tuned")
    elsewhere = {"dtype": "float32", "device_map": "auto", "max_memory": "cpu=1MB"}
    before, after = (
        model_digest(load(ModelConfig(str(folder), **elsewhere)).model) for folder in (tiny_folder, tmp_path / "tuned")
    )
    assert before != after == model_digest(inside)
