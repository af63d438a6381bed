"""Checkpoints described and served without torch: the same numbers as through transformers."""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from h2o_stream.attachment.describe import describe
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.loading.loading import load_model
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.tokenizer import FileTokenizer
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime import config_parameters, families, sources
from h2o_stream.runtime.families import MODEL_TYPES
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.sources import Checkpoint
from tests import published_configs
from tests.causal_models import make
from tests.descriptions import difference, same_weights
from tests.families import nudged
from tests.family_models import CHECKPOINTS, MODELS, TEXT
from tests.fixtures import thinned, with_exhaustive
from tests.in_turn import in_turn
from tests.published_configs import PUBLISHED, as_read, default_config, older_configs, recorded
from tests.test_first_start import chat
from tests.test_native_families import DESCRIBED
from tests.test_runtime import through_both
from tests.tolerance import relative_error

DTYPES = ("float32", "bfloat16")

ENTRIES = {"emu3_text_model": "emu3"}
"""In transformers' map, of types with another name."""

IN_MEMORY = {name for name, kind in MODEL_TYPES.items() if kind.architecture.only_modules}
NO_ROWS = {name for name in DESCRIBED if name.startswith(("Llama 4", "Moshi", "Nemotron-H", "OPT"))}
"""What is described only in memory."""

SHAPES = {
    "intermediate_size", "num_key_value_heads", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "kv_lora_rank", "q_lora_rank", "n_shared_experts", "n_routed_experts", "num_experts",
    "num_local_experts", "num_shared_experts", "moe_num_experts", "moe_num_shared_experts", "mamba_n_heads",
    "mamba_d_head", "mamba_num_heads", "linear_num_value_heads", "vocab_size_per_layer_input",
}  # fmt: skip
"""Entries whose weights would have other shapes, or be there or not."""


@pytest.fixture(scope="module")
def words() -> Any:
    """A tokenizer of a few words."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "User", ":", "the"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def saved(name: str, folder: Path, words: Any, dtype: str = "float32") -> Path:
    """The checkpoint of a model in two files, with weights in this dtype."""
    model = MODELS[name].make()
    weights = {key: value.to(getattr(torch, dtype)) for key, value in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights, max_shard_size="20KB")
    words.save_pretrained(folder)
    return folder


class TestDescription:
    @pytest.mark.every(2)
    @pytest.mark.parametrize(("name", "stored", "dtype"), thinned(
        itertools.product(CHECKPOINTS, DTYPES, DTYPES),
        lambda name, stored, dtype: 2 * DTYPES.index(stored) + DTYPES.index(dtype) == CHECKPOINTS.index(name) % 4,
    ))  # fmt: skip
    def test_equals_that_of_the_model(self, name: str, stored: str, dtype: str, tmp_path: Path, words: Any) -> None:
        path = saved(name, tmp_path, words, stored)
        source = Checkpoint(str(path), path, dtype, "none")
        description = source.describe(print)
        assert difference(description, describe(load(ModelConfig(str(path), dtype=dtype)).model)) == ""
        assert (description.output.kind == MatrixKind.FLOAT32) == (stored == dtype == "float32")

    def test_what_the_table_does_not_know(self, tmp_path: Path, words: Any) -> None:
        MODELS["Llama, YaRN"].make().save_pretrained(tmp_path)
        config = tmp_path / "config.json"
        for text, other, says in (("yarn", "spiral", "RoPE of type spiral"), ("llama", "x", "x is not in the table")):
            config.write_text(config.read_text().replace(f'"{text}"', f'"{other}"'))
            with pytest.raises(DescriptionError, match=says):
                Checkpoint("x", tmp_path, "float32", "none")

    @pytest.mark.parametrize(
        "older", [{"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 5e5}]
    )
    def test_how_older_configs_say_it(self, older: dict[str, Any]) -> None:
        config = MODELS["Llama 3"].make().config.to_dict()
        newer = {"rope_theta": 5e5, "rope_type": "linear" if len(older) > 1 else "default", "factor": 2.0}
        expected = config_parameters.parameters_of_config({**config, "rope_parameters": newer})[1]
        del config["rope_parameters"]
        found = config_parameters.parameters_of_config({**config, **older})[1]
        assert found.ropes[0] is not None
        assert expected.ropes[0] is not None
        numpy.testing.assert_array_equal(found.ropes[0].frequencies, expected.ropes[0].frequencies)


class TestRows:
    """Every type in the table, and families with settings of their own."""

    @pytest.mark.every(8)
    @pytest.mark.parametrize("name", sorted((MODEL_TYPES.keys() - IN_MEMORY) | (DESCRIBED.keys() - NO_ROWS)))
    def test_the_logits_of_transformers(self, name: str, tmp_path: Path) -> None:
        model = make(ENTRIES.get(name, name)) if name in MODEL_TYPES else DESCRIBED[name]()
        model = model if name == "kolibri1" else nudged(model)  # its biases of experts can only be zeros
        model.save_pretrained(tmp_path)
        source = Checkpoint(name, tmp_path, "float32", "none")
        kind, read = recorded(dict)
        source._dense.arrays = arrays = kind(source._dense.arrays)
        served = source.model(source.describe(print))
        assert arrays.keys() <= read
        moves = not (source.parameters.temperature or source.parameters.refused_positions)
        config = CacheConfig(window=44, chunk=16, positions="gap" if moves else "absolute", budgets="equal")
        with Engine(served, FileTokenizer(Tokenizer(models.BPE()), {}, None), config) as engine:
            found = [engine.served.forward(TEXT[:23]), *(engine.served.forward([token]) for token in TEXT[23:40])]
        expected = model(torch.tensor([TEXT[:40]])).logits[0, 22:]
        assert relative_error(torch.from_numpy(numpy.stack(found)), expected) < 5e-4

    @pytest.mark.every(4)
    @pytest.mark.parametrize("name", MODEL_TYPES)
    def test_what_a_config_leaves_out(self, name: str) -> None:
        """Numbers are those of the published class, the model is refused, or shapes of weights are."""
        config = default_config(name)
        whole = repr(config_parameters.parameters_of_config(config)[1])
        for entry in config.keys() - SHAPES:
            less = {key: value for key, value in config.items() if key != entry}
            try:
                assert repr(config_parameters.parameters_of_config(less)[1]) == whole, entry
            except DescriptionError:
                continue

    @pytest.mark.every(16)
    @pytest.mark.parametrize("name", MODEL_TYPES)
    def test_how_other_configs_say_it(self, name: str) -> None:
        for config, read in older_configs(name):
            with suppress(DescriptionError):
                found = config_parameters.parameters_of_config(config)
                assert repr(found) == repr(config_parameters.parameters_of_config(read))

    @pytest.mark.every(24)
    @pytest.mark.parametrize("name", sorted(MODEL_TYPES.keys() - IN_MEMORY))
    def test_packed_weights_are_read_again(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "MIN_BYTES", 0)
        make(ENTRIES.get(name, name)).save_pretrained(tmp_path / "model")
        logits = []
        for _ in range(2):
            source = Checkpoint(name, tmp_path / "model", "float32", "int8")
            source.folder = tmp_path / "packed"
            served = source.model(source.describe(print, print), ()).serve(
                CacheConfig("recent", window=16, chunk=4, positions="absolute")
            )
            logits.append(served.forward(TEXT[:12]))
        assert numpy.array_equal(*logits)

    @in_turn("name", PUBLISHED)
    def test_published_configs(self, name: str) -> None:
        found, wanted = (config_parameters.parameters_of_config(x) for x in (PUBLISHED[name], as_read(PUBLISHED[name])))
        assert repr(found) == repr(wanted)

    @pytest.mark.exhaustive
    def test_what_classes_say_is_known(self) -> None:
        """Else: python -m tests.published_configs > h2o_stream/runtime/families/published.json."""
        known = families.published()
        if known["transformers"] == transformers.__version__:
            assert known == published_configs.published()


class TestServed:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("name", thinned(zip(CHECKPOINTS), lambda name: CHECKPOINTS.index(name) % 3 == 0))
    def test_the_same_numbers(self, name: str, tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "file_tokenizer", FileTokenizer.from_folder)
        theirs, ours = through_both(saved(name, tmp_path, words), CacheConfig(window=20, chunk=4))
        with theirs, ours:
            for start, stop in ((0, 100), (100, 101), (101, 140), (140, 141)):
                expected, found = (torch.from_numpy(each.served.forward(TEXT[start:stop])) for each in (theirs, ours))
                assert relative_error(found, expected) < 1e-4
            assert ours.counts == theirs.counts
            theirs.served.load_state_dict(ours.served.state_dict())

    def test_bfloat16(self, tmp_path: Path, words: Any) -> None:
        """Also on units for it."""
        path = saved("Mistral", tmp_path, words, "bfloat16")
        theirs, ours = through_both(path, CacheConfig(window=40, chunk=16), "bfloat16")
        with theirs, ours:
            expected, found = (torch.from_numpy(each.served.forward(TEXT[:60])) for each in (theirs, ours))
        assert relative_error(found, expected) < 0.05

    @pytest.mark.every(2)
    @pytest.mark.parametrize(("name", "quantize", "min_bytes"), with_exhaustive(
        [("Gemma 2", "int4", 0), ("Gemma 2", "int8", 2**30), ("Llama, biases", "int8", 0), ("OLMoE", "int4", 0)],
        [("Gemma 2", "int8", 0), ("Gemma 2", "int4", 2**30)],
    ))  # fmt: skip
    def test_packed_weights(
        self,
        name: str,
        quantize: str,
        min_bytes: int,
        tmp_path: Path,
        own_cache: Path,
        words: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(sources, "MIN_BYTES", min_bytes)
        path = saved(name, tmp_path / "model", words)
        config = ModelConfig(str(path), dtype="float32", quantize=quantize)
        cache = CacheConfig(window=20, chunk=4)
        notes: list[str] = []
        first, again = (load_model(config, cache, "auto", notes.append, print) for _ in range(2))
        assert len(notes) == (not min_bytes)
        theirs = load(config, from_packed=False)
        for ours in (first, again):
            assert isinstance(ours.model, RuntimeModel)
            assert difference(ours.model.description, describe(theirs.model)) == ""
            if name != "OLMoE":  # whose experts' halves are joined in one of them
                assert same_weights(ours.model.description, describe(theirs.model))
        with (
            Engine(theirs.model, theirs.tokenizer, cache) as other,
            Engine(again.model, again.tokenizer, cache) as engine,
        ):
            expected, found = (torch.from_numpy(each.served.forward(TEXT[:60])) for each in (other, engine))
        assert relative_error(found, expected) < 1e-2
        if not min_bytes:
            assert Checkpoint(str(path), path, "float32", quantize).packed_difference() == ""

    @pytest.mark.parametrize(("quantize", "says"), [("int8", "--quantize int4"), ("auto", "take a smaller --model")])
    def test_too_little_memory(
        self, quantize: str, says: str, tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = saved("Llama 3", tmp_path / "model", words)
        monkeypatch.setattr(sources, "free_bytes", lambda: 2**10)
        with pytest.raises(OutOfMemoryError, match=f"are free; {says}"):
            Checkpoint(str(path), path, "float32", quantize)

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("own_cache")
    def test_a_chat_imports_no_torch(self, tmp_path: Path, words: Any) -> None:
        path = saved("Llama 3", tmp_path / "model", words)
        again = chat(path, "-v")
        assert (again.returncode, again.stdout.split()[-1]) == (0, "False"), again.stderr
