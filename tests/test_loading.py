"""Weights are packed while read, cached and mapped, or used directly from a GGUF file."""

import json
import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.base.progress import Progress
from h2o_stream.config import ModelConfig
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.loading import hf_weights
from h2o_stream.loading import transformers_model as loading
from h2o_stream.loading.hf_weights import HfWeights
from h2o_stream.loading.transformers_model import LoadedModel, load
from h2o_stream.models import packed_cache
from h2o_stream.models.packed_cache import cached_folders
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear, TiedHead
from h2o_stream.models.quantize import FORMAT, pack_model
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import pack
from h2o_stream.runtime import sources
from tests.family_models import written as write_gguf
from tests.fixtures import ids, make_llama, saved
from tests.tolerance import relative_error

IDS = ids(30)


@pytest.fixture
def cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, with every conversion cached."""
    monkeypatch.setattr(sources, "MIN_BYTES", 0)
    return own_cache / "packed"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    return saved(make_llama(heads=4, size=16, vocab=len(tokenizer)), tokenizer, tmp_path / "model")


def packed(folder: Path, quantize: str) -> PreTrainedModel:
    model: PreTrainedModel = pack_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), quantize)
    return model


def as_file(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


class TestQuantizer:
    @pytest.mark.parametrize("quantize", ["int8", "int4"])
    def test_every_matrix_is_that_of_the_checkpoint_packed(self, tmp_path: Path, quantize: str) -> None:
        original = make_llama(heads=4, size=16)
        model = packed(as_file(original, tmp_path), quantize)
        modules = dict(original.named_modules())
        found = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
        assert len(found) == 15
        for name, module in found.items():
            kind = MatrixKind.INT8 if name == "lm_head" or quantize == "int8" else MatrixKind.INT4
            assert module.kind == kind
            assert module.tiles.equal(pack(modules[name].weight.data, kind))
        assert isinstance(model.get_input_embeddings(), PackedEmbedding)
        assert not [name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Embedding)]
        assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]

    def test_logits_are_close(self, tmp_path: Path) -> None:
        original = make_llama(heads=4, size=16)
        logits, ours = original(IDS).logits, packed(as_file(original, tmp_path), "int8")(IDS).logits
        assert (ours - logits).norm() < 0.15 * logits.norm()  # it has large weights

    def test_a_tied_output_layer_has_no_weights_of_its_own(self, tmp_path: Path) -> None:
        original = make_llama(heads=4, size=16)
        original.config.tie_word_embeddings = True
        original.tie_weights()
        model = packed(as_file(original, tmp_path), "int4")
        head = model.get_output_embeddings()
        assert isinstance(head, TiedHead)
        assert head.tiles.data_ptr() == model.get_input_embeddings().tiles.data_ptr()
        assert not [name for name in model.state_dict() if "lm_head" in name]
        with torch.no_grad(), attach(model, CacheConfig(window=16)) as stream:
            assert stream.engine_note.startswith("native"), stream.engine_note

    def test_an_embedding_that_scales_its_rows(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 64}
        original = Gemma2ForCausalLM(Gemma2Config(num_attention_heads=2, num_key_value_heads=1, **sizes)).eval()
        model = packed(as_file(original, tmp_path), "int8")
        rows, ours = original.get_input_embeddings()(IDS), model.get_input_embeddings()(IDS)
        assert isinstance(model.get_input_embeddings(), PackedEmbedding)
        assert (ours - rows).norm() < 0.02 * rows.norm()

    def test_layers_without_whole_groups_stay(self, tmp_path: Path) -> None:
        model = packed(as_file(make_llama(heads=1, size=12), tmp_path), "int4")
        assert {type(module) for module in model.model.layers[0].self_attn.children()} == {nn.Linear}
        assert isinstance(model.model.layers[0].mlp.down_proj, PackedLinear)

    def test_a_packed_model_may_be_saved_and_loaded(self, tmp_path: Path) -> None:
        model = packed(as_file(make_llama(heads=4, size=16), tmp_path / "a"), "int4")
        again = AutoModelForCausalLM.from_pretrained(as_file(model, tmp_path / "b"))
        assert again(IDS).logits.equal(model(IDS).logits)

    def test_weights_of_another_version_are_refused(self, tmp_path: Path) -> None:
        as_file(packed(as_file(make_llama(heads=4, size=16), tmp_path / "a"), "int4"), tmp_path / "b")
        file = tmp_path / "b" / "config.json"
        config = json.loads(file.read_text())
        config["quantization_config"]["format"] = FORMAT + 1
        file.write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=f"format {FORMAT + 1}.*pack them again"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "b")

    def test_it_is_refused_where_it_cannot_be(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="int8, int4"):
            pack_model(make_llama(), "int3")
        folder = as_file(packed(as_file(make_llama(heads=4, size=16), tmp_path / "a"), "int4"), tmp_path / "b")
        with pytest.raises(ConfigError, match="--device-map"):
            AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        monkeypatch.setattr(library, "loaded", lambda: None)
        with pytest.raises(ConfigError, match="compiled library"):
            pack_model(make_llama(), "int4")


class TestKept:
    def test_the_second_start_packs_nothing(self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config, said = ModelConfig(str(folder), quantize="int4", device="cpu"), list[str]()
        first = load(config, notify=said.append).model
        (entry,) = cached_folders()
        assert str(folder) in entry.names
        assert any("MiB" in line and str(entry.path) in line for line in said)
        monkeypatch.setattr("h2o_stream.runtime.checkpoint_packing.pack", lambda *_: pytest.fail("packed again"))
        second = load(config, notify=said.append).model
        assert second(IDS).logits.equal(first(IDS).logits)
        assert len(said) == 1

    def test_another_checkpoint_is_packed_again(self, folder: Path, cache: Path) -> None:
        config = ModelConfig(str(folder), quantize="int4", device="cpu")
        load(config)
        (before,) = cached_folders()
        weights = folder / "model.safetensors"
        os.utime(weights, ns=(1, 1))
        load(config)
        (after,) = cached_folders()
        assert after.path != before.path, "the one that it replaces is removed"

    def test_damaged_ones_are_made_again(self, folder: Path, cache: Path) -> None:
        config, said = ModelConfig(str(folder), quantize="int4", device="cpu"), list[str]()
        expected = load(config).model(IDS).logits
        (entry,) = cached_folders()
        weights = entry.path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        again = load(config, notify=said.append).model
        assert again(IDS).logits.equal(expected)
        assert "damaged" in said[0]
        assert weights.stat().st_size > 5000

    def test_those_that_lack_weights_are_made_again(self, folder: Path, cache: Path) -> None:
        config, said = ModelConfig(str(folder), quantize="int4", device="cpu"), list[str]()
        expected = load(config).model(IDS).logits
        (entry,) = cached_folders()
        weights = load_file(entry.path / "model.safetensors")
        del weights["model.layers.0.mlp.up_proj.tiles"]
        save_file(weights, entry.path / "model.safetensors", {"format": "pt"})
        again = load(config, notify=said.append).model
        assert again(IDS).logits.equal(expected)
        assert "model.layers.0.mlp.up_proj.tiles is None" in said[0]

    def test_small_ones_are_not_kept(self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "MIN_BYTES", 2**30)
        load(ModelConfig(str(folder), quantize="int4", device="cpu"))
        assert not cached_folders()

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_a_failed_write_leaves_nothing(
        self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("h2o_stream.runtime.packed_file._mapped", fail)
        config, said = ModelConfig(str(folder), quantize="int4", device="cpu"), list[str]()
        if isinstance(error, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                load(config)
        else:
            assert load(config, notify=said.append).model
            assert "No space left" in said[-1]
        assert [path.suffix for path in cache.iterdir()] == [".lock"]

    def test_a_full_disk_is_reported_before(self, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packed_cache, "_RESERVED_BYTES", 2**60)
        said: list[str] = []
        load(ModelConfig(str(folder), quantize="int4", device="cpu"), notify=said.append)
        (line,) = said
        assert "not cached" in line
        assert "are free" in line

    def test_what_a_killed_one_left_is_cleared(self, folder: Path, cache: Path) -> None:
        config = ModelConfig(str(folder), quantize="int4", device="cpu")
        load(config)
        (entry,) = cached_folders()
        entry.path.rename(cache / f".{entry.path.name}.abc.partial")
        load(config)
        assert sorted(path.name for path in cache.iterdir()) == [entry.path.name, f"{entry.path.name}.lock"]

    def test_another_program_that_writes_is_left_alone(self, folder: Path, cache: Path) -> None:
        config = ModelConfig(str(folder), quantize="int4", device="cpu")
        load(config)
        (entry,) = cached_folders()
        packed_cache.forget(str(folder))
        with FileLock(entry.path.with_name(f"{entry.path.name}.lock")):
            assert load(config).model
        assert not cached_folders()


class TestGguf:
    @pytest.mark.exhaustive
    def test_the_embedded_model_is_as_in_its_file(self, embedded: LoadedModel) -> None:
        """Read without conversion: the packed format represents its Q4_1 matrices exactly."""
        model = load(ModelConfig(dtype="float32", device="cpu")).model
        down, up = model.model.layers[3].mlp.down_proj, model.get_input_embeddings()
        assert (down.kind, up.kind) == (MatrixKind.INT4, MatrixKind.INT8)
        assert isinstance(model.get_output_embeddings(), TiedHead)
        ids = torch.arange(100, 180)[None]
        # Activations are rounded to 14 bits.
        assert relative_error(model(ids).logits, embedded.model(ids).logits) < 5e-3

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(("quantize", "max_loss"), [("auto", 0.03), ("int8", 0.03), ("int4", 0.06)])
    def test_what_it_loses(self, embedded: LoadedModel, quantize: str, max_loss: float) -> None:
        text = "The city council met on Tuesday to discuss the new bridge over the river. " * 4
        ids = torch.tensor([embedded.tokenizer(text + "Nobody expected what the mayor said next.")["input_ids"]])

        def loss(model: PreTrainedModel) -> float:
            with torch.no_grad(), attach(model, CacheConfig("h2o", 48)):
                return float(cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:]))

        model = load(ModelConfig(dtype="float32", device="cpu", quantize=quantize)).model
        assert abs(loss(model) - loss(embedded.model)) < max_loss

    def test_repacking_reads_matrix_by_matrix(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No more than one matrix exists unpacked."""
        unpacked = most_unpacked = 0
        read, packed = HfWeights.values, hf_weights.pack

        def counted(weights: HfWeights, name: str) -> torch.Tensor:
            nonlocal unpacked, most_unpacked
            values = read(weights, name)
            unpacked += len(values.shape) == 2
            most_unpacked = max(most_unpacked, unpacked)
            return values

        def packing(*args: object) -> torch.Tensor:
            nonlocal unpacked
            unpacked -= 1
            return packed(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(HfWeights, "values", counted)
        monkeypatch.setattr(hf_weights, "pack", packing)
        load(ModelConfig(str(write_gguf(tmp_path, "Llama")), device="cpu", quantize="int4"))
        assert (unpacked, most_unpacked) == (0, 1)

    def test_progress_reaches_the_end_and_may_stop_it(self) -> None:
        steps: list[Progress] = []
        load(ModelConfig(device="cpu"), progress=steps.append)
        done = [step.done for step in steps if step.what == "reading"]
        assert done == sorted(done)
        assert done[-1] == steps[-1].total > 90e6

        def stop(step: Progress) -> None:
            if step.done > 10e6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            load(ModelConfig(device="cpu"), progress=stop)

    def test_it_is_refused_where_it_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("h2o_stream.loading.hf_weights.free_bytes", lambda: 50 * 2**20)
        with pytest.raises(OutOfMemoryError, match=r"needs .* of memory, 50.0 MiB are free"):
            load(ModelConfig(device="cpu"))

    @pytest.mark.exhaustive
    def test_without_the_library_it_is_unpacked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "loaded", lambda: None)
        said: list[str] = []
        model = load(ModelConfig(device="cpu", dtype="float32"), notify=said.append).model
        assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
        assert "unpacked" in said[0]


def test_auto_packs_what_does_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = ModelConfig(str(folder), device="cpu", dtype="float32")
    assert type(load(config, notify=said.append).model.lm_head) is nn.Linear
    assert not said
    monkeypatch.setattr(loading, "free_bytes", lambda: 3 * 2**20)
    model = load(config, notify=said.append).model
    assert isinstance(model.lm_head, PackedLinear)
    assert "--quantize" in said[0]
    monkeypatch.setattr(loading, "free_bytes", lambda: 2**18)
    with pytest.raises(OutOfMemoryError, match=r"are free; take a smaller --model"):
        load(config)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="auto, none, int8, int4"):
        ModelConfig(quantize="int3")
    with pytest.raises(ConfigError, match="--device-map"):
        ModelConfig(quantize="int8", device_map="auto")
    assert ModelConfig(device_map="auto").quantize == "auto"
