"""Model files whose numbers do not fit each other or the weights: refused in one line, whoever reads them."""

import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.loading.transformers_model import load
from h2o_stream.native import library
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.stepper import open_step
from h2o_stream.runtime import heads
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.parameters import tensor_name
from h2o_stream.runtime.sources import Checkpoint, ModelFile
from h2o_stream.session.conversation_state import ConversationState, load_conversation_state
from h2o_stream.session.state_files import StateFiles
from h2o_stream.session.state_format import write_state
from tests.hostile import attempt, cases_of, search_all
from tests.hostile_files import Folder, Gguf
from tests.hostile_kinds import KINDS
from tests.hostile_models import checkpoint_seed, gguf_seed
from tests.in_turn import in_turn

KINDS_TESTED = ("gguf", "checkpoint", "packed", "tokenizer", "store", "session", "texts", "structs")
COUNT = 200
SOME = ("SmolLM3", "Gemma 4, experts", "Qwen3-Next", "Mixtral", "Llama 3", "BPE", "Unigram", "m", "Llama, h2o",
    "settings.json", "questions.jsonl", "requests.jsonl")  # fmt: skip


@pytest.fixture(scope="module")
def smollm3(tmp_path_factory: pytest.TempPathFactory) -> Gguf:
    return gguf_seed("SmolLM3", tmp_path_factory.mktemp("hostile") / "a.gguf")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return checkpoint_seed("Llama 3", tmp_path_factory.mktemp("hostile") / "llama")


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's folders are changed, and then what they were."""
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))


def test_changed_files(homes: Any) -> None:
    """Some of those that `make sanitize` tries."""
    cases, counts = cases_of(KINDS_TESTED, some=lambda name: name in SOME), Counter[str]()
    assert [*search_all(cases, range(COUNT), counts)] == []
    assert counts["opened"] > COUNT / 20
    assert counts["refused"] > COUNT / 4


@pytest.mark.exhaustive
def test_what_is_changed_can_be_opened(homes: Any, tmp_path: Path) -> None:
    """Else nobody would find out what a change does."""
    for number, (kind, seed) in enumerate(cases_of(["checkpoint", "packed", "tokenizer", "store"])):
        seed.write(tmp_path / str(number))
        kind.open(tmp_path / str(number), seed)


@pytest.mark.exhaustive
def test_all_kinds(tmp_path: Path) -> None:
    assert [*search_all(cases_of([*KINDS]), range(3000), Counter())] == []


def test_layers_with_different_numbers_of_heads(smollm3: Gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm3.write(tmp_path / "model.gguf")
    source = ModelFile("x", tmp_path / "model.gguf", "float32")
    rules = heads.layer_rules(description := source.describe(print))
    monkeypatch.setattr(heads, "_measure", lambda *_: np.zeros(5 + 2 * (len(rules) - 2), np.float32))
    shapes = [rules[0].shape._replace(kv_heads=count) for count in (1, 4)]  # type: ignore[union-attr]
    uneven = [*(replace(rules[0], shape=shape) for shape in shapes), *rules[2:]]
    monkeypatch.setattr(heads, "layer_rules", lambda _: uneven)
    with pytest.raises(DescriptionError, match="different numbers of KV heads"):
        source.windows(description, print)


PANIC = (  # of the tokenizers library: a prefix that is longer than a piece
    b'{"version": "1.0", "model": {"type": "BPE", "continuing_subword_prefix": "####", '
    b'"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}}'
)
PANIC_LATER = (
    b'{"version": "1.0", "pre_tokenizer": {"type": "FixedLength", "length": 0}, "model": {"type": "BPE", "vocab": '
    b'{"a": 0, "b": 1}, "merges": []}}'
)
DEEP = b"[" * 9999 + b"]" * 9999
DAMAGED = [
    ("checkpoint", "Llama 3", "config.json", DEEP, "nested too deeply"),
    ("packed", "Llama 3", "model.safetensors", b"", "is damaged"),
    ("packed", "Llama 3", "model.safetensors", b"\2" + bytes(7) + b"{}", "tiles is None, not"),
    ("tokenizer", "BPE", "tokenizer.json", PANIC, "out of range"),
    ("tokenizer", "BPE", "tokenizer.json", PANIC_LATER, "chunk size"),
    ("tokenizer", "BPE", "generation_config.json", b"[3]", "no JSON object"),
    ("tokenizer", "BPE", "generation_config.json", b'{"eos_token_id": [[]]}', "eos_token_id"),
]


@in_turn("kind, name, file, content, words", DAMAGED)
def test_damaged_files(
    kind: str, name: str, file: str, content: bytes, words: str, homes: Any, tmp_path: Path, capfd: Any
) -> None:
    ((opener, seed),) = cases_of([kind], some=lambda each: each == name)
    damaged = replace(seed, files={**seed.files, file: content})
    damaged.write(tmp_path / "model")
    with pytest.raises((DescriptionError, H2OStreamError)) as refused:
        opener.open(tmp_path / "model", damaged)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "panicked" not in capfd.readouterr().err


def test_states_that_name_no_files(tmp_path: Path) -> None:
    """Of logs; they are ignored where others are deleted."""
    files, state, path = StateFiles(tmp_path), {"n": np.array(1)}, tmp_path / "state-00000001.safetensors"
    (tmp_path / "x.log").write_bytes(bytes(8))
    logs = ("3", '{"a": 3}', '{"a": ["x.log", 9]}', '{"a": [["x.log"], 9]}')
    for text in logs:
        with path.open("wb") as file:
            write_state(file, state, {"line": '{"turn": 3}', "logs": text})
        with pytest.raises(DataError, match="damaged"):
            files.read(1, 3)
        files.keep(lambda line: True)
    assert files.record(2) is None


KEYS: list[tuple[str, Any, str]] = [
    ("rope.dimension_count", 32, "rope.dimension_count is 32, more than the 16 numbers of a head"),
    ("rope.dimension_count", 7, "not an even number"),
    *((key, size, f"{key} is {size}, not a number from 1 t") for size in (0, 2**31) for key in (
        "block_count", "attention.head_count", "rope.dimension_count")),
    *(("block_count", size, f"block_count is {size}, and it has 4 layers") for size in (3, 5)),
    *(("rope.freq_base", base, "rope.freq_base is") for base in (0.0, -1.0, math.nan, math.inf, "10000")),
    *((f"rope.scaling.{key}", factor, f"rope.scaling.{key} is") for key in ("factor", "attn_factor")
        for factor in (-2.0, math.nan, math.inf, "4")),
    ("attention.head_count", 3, "do not share"),
    ("attention.head_count", 2**64 - 1, "head_count"),
    ("attention.key_length", 18, "different sizes"),
    ("context_length", 0, "context_length"),
    ("context_length", 2**63, "context_length"),
    ("embedding_length", 32, "not"),
    ("attention.layer_norm_rms_epsilon", float("nan"), "epsilon"),
    ("attention.scale", float("inf"), "scaling"),
]  # fmt: skip


@in_turn("key, value, words", KEYS)
def test_numbers_of_a_file(key: str, value: Any, words: str, smollm3: Gguf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    smollm3.with_value(f"smollm3.{key}", value).write(path)
    with pytest.raises((DescriptionError, H2OStreamError)) as refused:
        ModelFile("model", path, "float32").describe(print)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


CONFIG: list[tuple[str, Any, str]] = [
    ("partial_rotary_factor", 1.5, "partial_rotary_factor is 1.5"),
    ("num_hidden_layers", 2**31 - 1, "num_hidden_layers is 2147483647, not a number up to"),
    ("hidden_size", 2**40, "hidden_size is 1099511627776"),
    ("head_dim", -8, "head_dim is -8"),
    ("num_attention_heads", 10**400, "num_attention_heads is 1"),
    ("max_position_embeddings", 2**40, "max_position_embeddings"),
    ("vocab_size", True, "vocab_size is True"),
]


@in_turn("key, value, words", CONFIG)
def test_numbers_of_a_config(key: str, value: Any, words: str, llama: Folder, tmp_path: Path) -> None:
    """Neither reader makes anything of them."""
    config = {**json.loads(llama.files["config.json"]), key: value}
    folder = tmp_path / "model"
    Folder({**llama.files, "config.json": json.dumps(config).encode()}).write(folder)
    for read in (
        lambda: Checkpoint("model", folder, "float32", "none"),
        lambda: load(ModelConfig(str(folder)), CacheConfig()),
    ):
        with pytest.raises(H2OStreamError) as refused:
            read()
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)


def test_the_table_of_rotations_is_as_long_as_the_stream(smollm3: Gguf, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    smollm3.with_value("smollm3.context_length", 2**31 - 1).write(path)
    source = ModelFile("model", path, "float32")
    runtime: RuntimeModel = source.model(source.describe(print))
    served = runtime.serve(CacheConfig("recent", window=16, chunk=8, positions="gap"))
    served.forward(list(range(3, 23)))
    rows = [layer.attention.rope_rows for layer in served.stepper.model.layers if layer.attention.rope]
    assert max(rows) <= 256
    for token in range(60):
        served.forward([token])
    rows = [layer.attention.rope_rows for layer in served.stepper.model.layers if layer.attention.rope]
    assert 80 <= max(rows) <= 256


def test_native_code_names_what_does_not_fit(smollm3: Gguf, tmp_path: Path) -> None:
    smollm3.write(tmp_path / "model.gguf")
    source = ModelFile("model", tmp_path / "model.gguf", "float32")
    served = source.model(source.describe(print)).serve(CacheConfig("recent", window=16, chunk=8))
    served.forward([3, 4])
    served.stepper.model.layers[1].attention.kv_heads = 3
    with pytest.raises(H2OStreamError, match="numbers of the cache do not fit"):
        served.forward([5])
    native = library.loaded()
    assert native
    with pytest.raises(H2OStreamError, match="an attention does not fit the rest of the model"):
        open_step(native, served.stepper.model)


def test_a_conversation_of_too_many_turns() -> None:
    template: Any = None
    state = ConversationState(None, template, turns=2**31 - 1).state_dict()
    with pytest.raises(H2OStreamError, match="damaged"):
        load_conversation_state(state, lambda system: template)


def test_any_name_of_a_tensor() -> None:
    assert tensor_name("blk.12.a\nb.weight") == (12, "a\nb", "weight")
    assert str(DescriptionError("a\nb is 2")) == "a b is 2"
    assert tensor_name(long := f"blk.{'1' * 5000}.a") == (None, long, "")


def test_experts_of_a_router_without_numbers(tmp_path: Path) -> None:
    """Each is chosen once, also by NaN: a prompt of many tokens ends."""
    file = gguf_seed("ERNIE 4.5 MoE", tmp_path / "model.gguf")
    router = next(tensor for tensor in file.tensors if "ffn_gate_inp" in tensor.name)
    nan = b"\0\0\xc0\x7f" * (len(file.data[router.name]) // 4)
    broken = Gguf(file.values, file.raw, file.tensors, {**file.data, router.name: nan})
    broken = broken.with_value("ernie4_5-moe.expert_used_count", 4)
    broken.write(tmp_path / "model.gguf")
    assert attempt(KINDS["gguf"].open, tmp_path / "model.gguf", broken) == "opened"
