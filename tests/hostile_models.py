"""Models from outside: files of all families, checkpoints, adapters, packed ones, descriptions."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.hostile_files import Folder, Gguf
from tests.hostile_structs import Structs

PROMPT, STEPS = 6, 2

Seed = Gguf | Folder | Structs
Makers = Mapping[str, Seed | Callable[[], Seed]]


def ignore(*_: Any) -> None:
    pass


def gguf_seed(name: str, path: Path) -> Gguf:
    """The file of a family, written to this path."""
    from tests.family_models import written

    return Gguf.read(written(path, name))


def checkpoint_seed(name: str, path: Path) -> Folder:
    """The checkpoint of a family or of a type of models, written to this folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    from tests.causal_models import make
    from tests.family_models import MODELS

    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "the"])}
    backend = Tokenizer(models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    model = MODELS[name].make() if name in MODELS else make(name)
    if model.config.model_type.startswith("qwen"):  # transformers makes another of what is there
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Qwen2Tokenizer(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    for saved in (model, tokenizer):
        saved.save_pretrained(path)
    return Folder.read(path, "config.json")


def checkpoints(folder: Path) -> Makers:
    from h2o_stream.runtime.families import MODEL_TYPES
    from tests.causal_models import ENTRIES
    from tests.family_models import CHECKPOINTS

    types = sorted(name for name in MODEL_TYPES.keys() & {*ENTRIES} if not MODEL_TYPES[name].architecture.only_modules)
    names = [*CHECKPOINTS, *types]
    return {name: partial(checkpoint_seed, name, folder / name) for name in names}


def adapters(folder: Path) -> Makers:
    """LoRA of llama.cpp, and of PEFT without its model and with it."""
    from safetensors.numpy import save

    made = gguf_seed("Llama", folder / "a.gguf")
    base = checkpoint_seed("Llama 3", folder / "base")
    lora = made.with_value("adapter.type", "lora").with_value("adapter.lora.alpha", 8.0)
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "x",
    }
    peft = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save({})}
    return {
        "GGUF": lora,
        "PEFT": Folder(peft, "adapter_config.json"),
        "PEFT, merged": Folder({**base.files, **peft}, "adapter_config.json"),
    }


def open_model(path: Path, seed: Seed) -> None:
    """Every eighth file as a chat does, with its identity, packed weights that are kept and heads that are measured."""
    from h2o_stream.config import CacheConfig, ModelConfig
    from h2o_stream.loading import loading
    from h2o_stream.runtime import sources

    config = ModelConfig(str(path), offline=True, dtype="float32")
    parts = seed.raw if isinstance(seed, Gguf) else seed.files
    if sum(map(len, parts.values())) % 8 == 0:
        with patch.multiple(sources, MIN_BYTES=0, MIN_GGUF_BYTES=0):  # small ones are kept, too
            cache = CacheConfig("h2o", window=32)
            loaded = loading.load_without_torch(config, cache, "auto", ignore, ignore, str(path))
        model, tokenizer = loaded.model, loaded.tokenizer
    else:
        source = loading.open_source(config, path, ignore)
        tokenizer = source.tokenizer()[0]
        with patch.object(sources, "shipped_digest", lambda *_: "any"):  # it takes as long as the rest
            model = source.model(source.describe(ignore), ())
    _step(model, tokenizer("the an th")["input_ids"])


def open_with_torch(path: Path, seed: Seed) -> None:
    from h2o_stream.config import CacheConfig, ModelConfig
    from h2o_stream.loading.transformers_model import load

    loaded = load(ModelConfig(str(path), offline=True, dtype="float32"), CacheConfig(), ignore, ignore)
    _step(loaded.model, loaded.tokenizer("the an th")["input_ids"])


def _step(model: Any, tokens: list[int]) -> None:
    """Take a prompt and some tokens through a model."""
    from h2o_stream.config import CacheConfig
    from h2o_stream.engine.served import serve

    budgets = "measured" if getattr(model, "windows", True) else "equal"
    served = serve(model, CacheConfig("h2o", window=32, chunk=4, budgets=budgets), "auto", ignore)
    vocabulary = getattr(served, "vocabulary", 64)
    served.forward([token % vocabulary for token in (*tokens, *range(3, 3 + PROMPT))])
    for token in range(STEPS):
        served.forward([token % vocabulary])
    served.close()


def packed(folder: Path) -> Makers:
    """Packed weights that were kept: of checkpoints, and of GGUF files in their own forms."""
    kept = (("Llama 3", "int8"), ("Gemma 2", "int4"), ("Llama", ""), ("Gemma 4, experts", ""))
    return {name: partial(_packed_seed, name, quantize, folder) for name, quantize in kept}


def _packed_seed(name: str, quantize: str, folder: Path) -> Seed:
    from h2o_stream.runtime import sources
    from h2o_stream.runtime.sources import Checkpoint, ModelFile

    path = folder / f"{name} {quantize}"
    made = checkpoint_seed(name, path) if quantize else gguf_seed(name, path)
    source = Checkpoint(name, path, "float32", quantize) if quantize else ModelFile(name, path, "float32")
    source.folder = folder / f"{name} packed"
    with patch.object(sources, "MIN_BYTES", 0):
        source.describe(ignore, ignore)
    return Folder.read(source.folder, note=(made, quantize))


def open_packed(path: Path, seed: Seed) -> None:
    from h2o_stream.runtime.sources import Checkpoint, ModelFile

    assert isinstance(seed, Folder)
    (whole, quantize), place = seed.note, path.with_name(f"whole-{id(seed.note)}")
    if not place.exists():
        whole.write(place)
    source = Checkpoint("m", place, "float32", quantize) if quantize else ModelFile("m", place, "float32")
    source.folder = path
    _step(source.model(source.describe(ignore), ()), [3, 4])


def structs_seed(name: str, path: Path) -> Seed:
    """The description of a family."""
    from h2o_stream.native.native_model import NativeModel
    from h2o_stream.runtime.sources import ModelFile

    gguf_seed(name, path)
    model = NativeModel(ModelFile(name, path, "float32").describe(ignore))
    return Structs(bytes(model.struct), tuple(map(bytes, model.layers)))


def ggufs(folder: Path, make: Callable[[str, Path], Seed] = gguf_seed) -> Makers:
    from tests.family_models import GGUF

    return {name: partial(make, name, folder / "a.gguf") for name in GGUF}
