"""Models of any shape with random weights, and GGUF files of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from h2o_lab.random_models.gguf import write_random_gguf
from h2o_lab.random_models.weights import DEVIATION, random_model, read_settings
from h2o_stream import attach
from h2o_stream.attachment.describe import weight_bytes
from h2o_stream.compare.speed.engines import LLAMA_CPP, OURS, EngineSpec
from h2o_stream.compare.speed.worker import Worker
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear
from h2o_stream.native.abi import MatrixKind
from tests.commands import invoke
from tests.packed_tiles import numbers

VOCABULARY = 301


def llama(kind: type = LlamaConfig, **settings: Any) -> Any:
    """Settings for three small layers."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    sizes |= settings
    return kind(**sizes, head_dim=sizes["hidden_size"] // 4, pad_token_id=0, bos_token_id=1, eos_token_id=2)


class TestRandomWeights:
    """Models built from a config alone."""

    @pytest.mark.every(2)
    @pytest.mark.parametrize("quantize", ["int8", "int4"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_packed_models_are_native(self, tmp_path: Path, quantize: str, tied: bool) -> None:
        llama(tie_word_embeddings=tied).save_pretrained(tmp_path)
        model = random_model(tmp_path / "config.json", ModelConfig(quantize=quantize, dtype="float32", device="cpu"))
        packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
        assert len(packed) == 7 * 3 + 1
        assert isinstance(model.get_input_embeddings(), PackedEmbedding)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
        assert all(bool((norm == 1).all()) for norm in model.parameters())
        kinds = {module.kind for module in packed if module is not model.lm_head}
        assert kinds == {MatrixKind.INT8 if quantize == "int8" else MatrixKind.INT4}
        assert model.lm_head.kind == MatrixKind.INT8
        for module in packed:
            weights = numbers(module.tiles, module.kind, module.out_features, module.in_features)
            assert float(weights.std()) == pytest.approx(DEVIATION, rel=0.1)
        with attach(model, CacheConfig(window=16)) as cache:
            model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
            logits = model(torch.tensor([[8]]), past_key_values=cache).logits
            assert cache.engine_note.startswith("native")
        assert logits.isfinite().all()
        assert logits.std() > 0

    def test_experts_are_packed_too(self, tmp_path: Path) -> None:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        llama(Qwen3MoeConfig, **experts).save_pretrained(tmp_path)
        model = random_model(tmp_path, ModelConfig(quantize="int4", dtype="float32", device="cpu"))
        matrices = [name for name, weight in model.named_parameters() if weight.dim() > 1]
        assert all(name.endswith("mlp.gate.weight") for name in matrices)
        with attach(model, CacheConfig(window=16)) as cache:
            assert cache.engine_note.startswith("native")

    def test_a_tied_head_is_read_once(self, tmp_path: Path) -> None:
        sizes = {}
        for tied in (False, True):
            llama(tie_word_embeddings=tied).save_pretrained(tmp_path)
            model = random_model(tmp_path, ModelConfig(quantize="int8", dtype="float32", device="cpu"))
            sizes[tied] = weight_bytes(model)
            tiles = {
                module.tiles.data_ptr(): module.tiles.nbytes for module in model.modules() if hasattr(module, "tiles")
            }
            embedding = model.get_input_embeddings().tiles.nbytes
            assert len(tiles) == 7 * 3 + (1 if tied else 2)
            assert sizes[tied] == sum(tiles.values()) - (0 if tied else embedding)

    def test_rows_beyond_the_last_are_zero(self, tmp_path: Path) -> None:
        """A vocabulary as in packed matrices: 301 tokens are 18 tiles and 13 rows of another."""
        llama().save_pretrained(tmp_path)
        model = random_model(tmp_path, ModelConfig(quantize="int8", dtype="float32", device="cpu"))
        rows = numbers(model.lm_head.tiles, MatrixKind.INT8, 304, 64)
        assert not rows[VOCABULARY:].any()
        assert rows[:VOCABULARY].any(1).all()

    @pytest.mark.parametrize(("content", "said"), [
        (None, "no such file"),
        ("{", "JSON"),
        ('{"model_type": "nonsense"}', "nonsense"),
        ('{"model_type": "vit"}', "vit"),
    ])  # fmt: skip
    def test_settings_that_cannot_be_read_are_one_line(self, tmp_path: Path, content: str | None, said: str) -> None:
        settings = tmp_path / "config.json"
        if content is not None:
            settings.write_text(content)
        with pytest.raises(ConfigError, match=f"--random-weights .*{said}") as caught:
            read_settings(settings)
        assert "\n" not in str(caught.value)


class TestRandomFiles:
    """GGUF files with the shapes of a config."""

    @pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
    def test_shapes_and_types(self, tmp_path: Path, kind: type) -> None:
        config = llama(kind, hidden_size=512, intermediate_size=768, num_hidden_layers=9)
        file = tmp_path / "random.gguf"
        progress = list(write_random_gguf(config, "int4", file))
        reader = GGUFReader(file)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert progress[0][0] == 0
        assert progress[-1][1] == sum(int(tensor.n_bytes) for tensor in reader.tensors)
        assert len(progress) == len(tensors)
        assert tensors["token_embd.weight"].shape.tolist() == [512, VOCABULARY]
        assert tensors["blk.8.ffn_down.weight"].shape.tolist() == [768, 512]
        assert tensors["blk.0.attn_k.weight"].shape.tolist() == [512, 256]
        assert tensors["output.weight"].tensor_type == GGMLQuantizationType.Q6_K
        better = [i for i in range(9) if tensors[f"blk.{i}.attn_v.weight"].tensor_type == GGMLQuantizationType.Q6_K]
        assert better == [0, 3, 6, 7, 8], "the rule of llama.cpp"
        for name in ("output.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight"):
            weights = dequantize(tensors[name].data, tensors[name].tensor_type)
            assert float(weights.std()) == pytest.approx(DEVIATION, rel=0.05)
            assert abs(float(weights.mean())) < DEVIATION / 20
        assert (tensors["output_norm.weight"].data == 1).all()
        assert ("blk.0.attn_q.bias" in tensors) == (kind is Qwen2Config)
        assert ("blk.0.attn_q_norm.weight" in tensors) == (kind is Qwen3Config)
        assert len(reader.fields["tokenizer.ggml.tokens"].data) == VOCABULARY

    @pytest.mark.parametrize(
        ("precision", "name"),
        [("int4", "Q5_0"), ("int8", "Q8_0"), ("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")],
    )
    def test_precisions(self, tmp_path: Path, precision: str, name: str) -> None:
        """Rows of 64 do not fill a block of Q4_K; llama.cpp uses Q5_0 instead."""
        file = tmp_path / "random.gguf"
        assert list(write_random_gguf(llama(tie_word_embeddings=True), precision, file))
        tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
        assert tensors["blk.1.attn_q.weight"].tensor_type.name == name
        assert "output.weight" not in tensors
        weights = dequantize(tensors["blk.1.attn_q.weight"].data, tensors["blk.1.attn_q.weight"].tensor_type)
        assert float(weights.std()) == pytest.approx(DEVIATION, rel=0.05)

    def test_llama_cpp_reads_them(self, tmp_path: Path) -> None:
        pytest.importorskip("llama_cpp")
        list(write_random_gguf(llama(), "int4", tmp_path / "random.gguf"))
        contender = EngineSpec(LLAMA_CPP, ModelConfig(str(tmp_path / "random.gguf")), CacheConfig("full"), length=50)
        with Worker(contender) as worker:
            assert worker.call("info").context == 512
            assert worker.call("feed", [5] * 40) > 0

    def test_other_architectures_and_full_disks_are_one_line(self, tmp_path: Path, monkeypatch: Any) -> None:
        with pytest.raises(ConfigError, match="gpt_neox.*leave --peers llama.cpp out"):
            next(write_random_gguf(GPTNeoXConfig(), "int4", tmp_path / "x.gguf"))
        with pytest.raises(ConfigError, match="llama with biases"):
            next(write_random_gguf(llama(attention_bias=True), "int4", tmp_path / "x.gguf"))
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(DataError, match=r"takes 0\.0 GB.*TMPDIR"):
            next(write_random_gguf(llama(), "int4", tmp_path / "x.gguf"))
        assert not (tmp_path / "x.gguf").exists()

    @pytest.mark.exhaustive
    def test_in_the_shell(self, tmp_path: Path, monkeypatch: Any, tiny_folder: Path, text: Path) -> None:
        """A speed comparison with llama.cpp on random weights, whose file is deleted afterwards."""
        pytest.importorskip("llama_cpp")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        llama().save_pretrained(tmp_path)
        base = ["speed", "--model", tiny_folder, "--text", text, "--random-weights", tmp_path / "config.json"]
        more = ["--histories", 64, "--policies", "h2o", "--windows", 32, "--peers", "llama.cpp", "--quantize", "int4"]
        done = invoke("h2o-compare", *base, *more, "--jsonl", tmp_path / "speed.jsonl")
        assert done.exit_code == 0, done.stderr
        records = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
        figures = [record for record in records if record["type"] == "speed"]
        assert [(figure["engine"], figure["quantize"]) for figure in figures] == [(OURS, "int4"), (LLAMA_CPP, "int4")]
        assert all(figure["weight_bytes"] < 500_000 for figure in figures)
        assert not list((tmp_path / "temporary").iterdir())
        GPTNeoXConfig().save_pretrained(tmp_path)
        wrong = invoke("h2o-compare", *base, *more)
        assert wrong.exit_code == 2
        assert "gpt_neox" in wrong.stderr
