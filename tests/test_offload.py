"""Models larger than the device, and caches in host memory."""

import mmap
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerBase

from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.attention_interface import h2o_attention
from h2o_stream.base.memory import disk_bytes
from h2o_stream.cache.counts import CacheCounts
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.mapped_memory import mapped_memory
from h2o_stream.cache.slots import ENCODED, STORED
from h2o_stream.compare.options import configs_of
from h2o_stream.config import CacheConfig, ModelConfig, Settings
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.precision import device_map_kwargs
from h2o_stream.session.turn import Timings, Turn
from h2o_stream.ui.start import LoadedConversation
from h2o_stream.ui.terminal import Terminal
from tests.fixtures import make_llama, saved, with_exhaustive

IDS = torch.tensor([[1, 7, 9, 4, 11, 30, 6, 5, 17, 8, 3, 21] * 4])


@pytest.mark.parametrize("policy", with_exhaustive(["h2o"], ["full", "sink"]))
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


@pytest.mark.every(2)
@pytest.mark.parametrize("policy", ["h2o", "recent", "tova"])
def test_a_cache_in_host_memory_of_a_model_elsewhere(policy: str) -> None:
    """Fake tensors have no data but track devices, and refuse to be mixed across devices like real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True):
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


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "settings", with_exhaustive([{"kv_bits": 4}, {"policy": "h2o-paper"}], [{}, {"budgets": "equal"}])
)
def test_a_cache_on_disk_gives_the_same_output(tiny_folder: Path, settings: dict[str, Any], own_cache: Path) -> None:
    model = load(ModelConfig(str(tiny_folder), dtype="float32", device="cpu")).model
    generated, states = [], []
    for device in ("cpu", "disk"):
        config = CacheConfig(**{"policy": "h2o", "window": 32, "sinks": 4, **settings, "device": device})
        with attach(model, config) as cache:
            generated.append(model.generate(IDS, max_new_tokens=24, do_sample=False, num_beams=2).tolist())
            assert all(is_mapped(group, own_cache) == (device == "disk") for group in cache.head_groups)
            states.append(cache.state_dict())
    assert generated[0] == generated[1]
    assert states[0].keys() == states[1].keys()
    with attach(model, config) as cache:
        cache.load_state_dict(states[0])
        assert is_mapped(cache.head_groups[0], own_cache)
    assert not list(own_cache.glob("slots/*")), "nothing stays behind"


def is_mapped(group: HeadGroup, folder: Path) -> bool:
    """Whether the process maps files of a folder where keys and values, and their codes, are."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    places = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    addresses = [x.data_ptr() for name, x in group.tensors().items() if name in {*STORED, *ENCODED}]
    return all(any(start <= address < end for start, end in places) for address in addresses)


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(H2OStreamError, match=r"No space left on device.*--cache-device cpu"):
        mapped_memory(16)
    assert not list(own_cache.glob("slots/*"))


def test_a_full_cache_stays_off_the_disk() -> None:
    with pytest.raises(ConfigError, match="--cache-device takes cpu"):
        CacheConfig("full", device="disk")
    full, ours = configs_of(("full", "h2o"), (32,), (0,), {"device": "disk"})
    assert (full.device, ours.device) == ("cpu", "disk")


def test_percentages_of_the_weights(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    saved(make_llama(vocab=64, layers=8), tokenizer, tmp_path)

    def placed(memory: str) -> list[object]:
        model = load(ModelConfig(str(tmp_path), dtype="float32", device_map="auto", max_memory=memory)).model
        return list(getattr(model, "hf_device_map", {"": "cpu"}).values())

    config = ModelConfig(device_map="auto", max_memory="0=20%,cpu=50.5%")
    assert device_map_kwargs(config, 1000)["max_memory"] == {0: 200, "cpu": 505}
    assert "disk" not in placed("cpu=200%")
    half, less = placed("cpu=60%"), placed("cpu=35%")
    assert {"cpu", "disk"} <= set(half) | set(less)
    assert half.count("disk") < less.count("disk")


class TestOptions:
    @pytest.mark.parametrize("text", ["10GiB", "cpu:10GiB", "gpu=1GiB", "0=ten", "0=10", "cpu=%", "cpu=5", "0=1GiB,,"])
    def test_invalid_memory_sizes(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--max-memory takes them like 0=10GiB,cpu=24GiB"):
            ModelConfig(device_map="auto", max_memory=text)

    def test_memory_by_device(self) -> None:
        config = ModelConfig(device_map="auto", max_memory="0=10GiB, cpu=1.5GB")
        assert config.memory_by_device() == {0: "10GiB", "cpu": "1.5GB"}


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


SIZE = 4 * 2**20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(SIZE))
    return path


def turn(nbytes: int) -> Turn:
    return Turn(1, "", "", Timings(), CacheCounts(*[0] * 8), 0, "stop", disk_bytes=nbytes)


@pytest.mark.skipif(not disk_bytes(), reason="this system does not count what is read from disk")
def test_pages_of_a_mapped_file_are_counted(weights: Path) -> None:
    if not os.major(weights.stat().st_dev):
        pytest.skip("this folder is on no disk")
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    before = disk_bytes()
    assert sum(data[:: mmap.PAGESIZE]) > 0
    assert disk_bytes() - before in range(SIZE, 2 * SIZE)
    again = disk_bytes()
    assert sum(data[:: mmap.PAGESIZE]) > 0
    assert disk_bytes() == again


@pytest.mark.parametrize("verbose", [True, False])
def test_the_user_is_told_once(verbose: bool, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, missing = LoadedModel("name", None, None, file=weights), LoadedModel("name", None, None)
    conversation: Any = LoadedConversation(None, None, model, Settings())  # type: ignore[arg-type]
    terminal, shown = Terminal(verbose=verbose), list[str]()
    for nbytes in (2**30, 0, 2**29, 2**30):
        conversation.note_disk(turn(nbytes), terminal)
        shown.append(capsys.readouterr().err)
    assert ["do not stay in memory" in lines for lines in shown] == [False, False, True, False]
    assert ["were read from disk" in lines for lines in shown] == [verbose and count > 0 for count in (1, 0, 1, 1)]
    unknown = replace(conversation, model=missing)
    unknown.note_disk(turn(2**31), terminal)
    assert "memory" not in capsys.readouterr().err


def test_other_files_are_no_weights(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small model's first turns read more than its weights: libraries and texts."""
    model = LoadedModel("name", None, None, file=weights)
    conversation: Any = LoadedConversation(None, None, model, Settings())  # type: ignore[arg-type]
    conversation.note_disk(turn(10 * SIZE), Terminal())
    assert "memory" not in capsys.readouterr().err
