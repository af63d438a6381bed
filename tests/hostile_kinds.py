"""Kinds of files from outside: what is changed, and who opens it as the commands do."""

import json
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.hostile_files import Folder
from tests.hostile_models import (
    Makers,
    Seed,
    adapters,
    checkpoints,
    gguf_seed,
    ggufs,
    ignore,
    open_model,
    open_packed,
    open_with_torch,
    packed,
    structs_seed,
)
from tests.hostile_structs import compute


@dataclass(frozen=True)
class Kind:
    """Files of a kind.

    Attributes:
        make: those that are changed by name, or what makes them in an empty folder.
        open: opens one as the commands do; raises what they would.
    """

    make: Callable[[Path], Makers]
    open: Callable[[Path, Seed], None]


# what comes with models


def _tokenizers(folder: Path) -> Makers:
    """Of all models of the tokenizers library, in the classes of transformers that are read here."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    from tests.test_models import PLAIN

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_bpe = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*letters, "th"])}, [("t", "h")]))
    bytes_bpe.pre_tokenizer, bytes_bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("the", -2.0), ("a", -3.0)], 0))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    pieces = Tokenizer(models.WordPiece({"<unk>": 0, "the": 1, "##a": 2, "a": 3}, unk_token="<unk>"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    pieces.post_processor = processors.TemplateProcessing("<unk> $A", None, [("<unk>", 0)])
    parts = Tokenizer(models.BPE({letter: number for number, letter in enumerate("▁theaqu")}, []))
    parts.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Prepend("▁"), normalizers.Nmt()])
    parts.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.FixedLength(5), pre_tokenizers.Split(" ", "isolated")]
    )
    parts.post_processor = processors.BertProcessing(("e", 3), ("h", 2))
    parts.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip("e", 0, 0), decoders.CTC("q")])
    generation = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "eos_token_id": [2],
    }
    seeds = dict[str, Seed]()
    for name, backend in (("BPE", bytes_bpe), ("Unigram", unigram), ("WordPiece", pieces), ("parts", parts)):
        saved = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
        saved.chat_template = PLAIN
        saved.save_pretrained(folder / name)
        more = {"generation_config.json": json.dumps(generation).encode(), "config.json": b'{"model_type": "llama"}'}
        seeds[name] = Folder({**Folder.read(folder / name).files, **more})
    Qwen2Tokenizer(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]).save_pretrained(
        folder / "q"
    )
    seeds["Qwen 2"] = Folder.read(folder / "q")
    return seeds


def _open_tokenizer(path: Path, seed: Seed) -> None:
    """As a chat does: encodes, renders and decodes, and finds out what ends a turn and how to sample."""
    from h2o_stream.base.token_texts import TokenTextStream
    from h2o_stream.config import SamplingConfig
    from h2o_stream.engine.sampling import Sampler
    from h2o_stream.models.file_tokenizers import file_tokenizer
    from h2o_stream.models.generation_config import read_generation_config
    from h2o_stream.models.templates import with_template
    from h2o_stream.models.turn_tokens import end_tokens
    from h2o_stream.session.template import ChatTemplate

    bare = file_tokenizer(path)
    generation = read_generation_config(path)
    if bare is None:
        return
    tokenizer, _ = with_template(bare)
    Sampler(SamplingConfig(), generation)
    tokens = ChatTemplate(tokenizer, "Be brief.", end_tokens(generation, tokenizer)).first_turn("the quick 1").tokens
    tokenizer.decode(tokenizer("the quick 1 \ue000 é")["input_ids"])
    stream = TokenTextStream(tokenizer.backend_tokenizer)
    for token in (*tokens, *range(min(len(tokenizer), 500))):
        stream.push(token)


def _stores(folder: Path) -> Makers:
    """Models in ollama's store, with what a Modelfile adds."""
    from tokenizers import Tokenizer, models

    from h2o_stream.models.tokenizer import FileTokenizer
    from tests.test_models import PLAIN

    params = {"temperature": 0.5, "top_k": 40, "stop": ["</s>", "User:"], "num_ctx": 2048}
    layers = {
        "model": "GGUF", "params": json.dumps(params), "system": "Be brief.", "messages": "[]",
        "template": "{{ if .System }}{{ .System }}{{ end }}User: {{ .Prompt }}\nBot: {{ .Response }}</s>",
    }  # fmt: skip
    listed = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{number:064}"}
              for number, kind in enumerate(layers)]  # fmt: skip
    files = {f"blobs/sha256-{number:064}": text.encode() for number, text in enumerate(layers.values())}
    manifest = "manifests/registry.ollama.ai/library/m/latest"
    words = Tokenizer(models.WordLevel({"<unk>": 0, "User:": 1}, "<unk>"))
    tokenizer = FileTokenizer(words, {"eos_token": "</s>"}, PLAIN)
    return {
        "m": Folder({manifest: json.dumps({"layers": listed}).encode(), **files}, f"blobs/sha256-{4:064}", tokenizer)
    }


def _open_store(path: Path, seed: Seed) -> None:
    from h2o_stream.models.loaded import LoadedModel
    from h2o_stream.models.modelfile import with_modelfile
    from h2o_stream.models.other_tools import ollama_file

    os.environ["OLLAMA_MODELS"] = str(path)
    ollama_file("ollama:m")
    with_modelfile(LoadedModel("ollama:m", None, seed.note), ignore)


# conversations

CACHES: Mapping[str, Mapping[str, Any]] = {
    "h2o": {}, "4 bits": {"kv_bits": 4}, "absolute": {"positions": "absolute"},
}  # fmt: skip


def _conversation(model: Path, cache: Mapping[str, Any]) -> Any:
    """The history of a new conversation with a model."""
    from h2o_stream.config import CacheConfig, ModelConfig, SamplingConfig
    from h2o_stream.engine.engine import Engine
    from h2o_stream.loading import loading
    from h2o_stream.session.conversation import Conversation
    from h2o_stream.session.history import ConversationHistory
    from h2o_stream.session.transcript import Header

    if model not in _LOADED:
        config = ModelConfig(str(model), offline=True, dtype="float32")
        _LOADED[model] = loading.load_without_torch(config, CacheConfig("h2o"), "auto", ignore, ignore, str(model))
    loaded, sampling = _LOADED[model], SamplingConfig(temperature=0, max_tokens=4)
    engine = Engine(loaded.model, loaded.tokenizer, CacheConfig("h2o", window=32, chunk=16, **cache), sampling)
    conversation = Conversation(engine, None, loaded.stops, "auto")
    return ConversationHistory(conversation, Header("m", "h2o", 32, None))


_LOADED = dict[Path, Any]()


def _sessions(folder: Path) -> Makers:
    """Conversations of some turns, with all that is kept of them."""
    pairs = product(("Llama", "Qwen3-Next"), CACHES)
    return {f"{family}, {cache}": partial(_session_seed, family, cache, folder) for family, cache in pairs}


def _session_seed(family: str, cache: str, folder: Path) -> Seed:
    from h2o_stream.session.folders import sessions_folder, write_settings

    gguf_seed(family, model := folder / f"{family}.gguf")
    history = _conversation(model, CACHES[cache])
    history.open("talk")
    for text in ("the an th the", "than an " * 9, "th"):
        list(history.say(text))
    history.undo()
    history.close()
    write_settings("talk", {"temperature": 0.5, "window": 32})
    kept = Folder.read(sessions_folder() / "talk", "", (model.read_bytes(), CACHES[cache]))
    shutil.rmtree(sessions_folder())
    return kept


def _open_session(path: Path, seed: Seed) -> None:
    """As ``--session``: resumed, or where that is refused read again; then a turn, an undo and a search."""
    from h2o_stream.session.folders import read_settings, saved_sessions
    from h2o_stream.session.transactions import ResumeError

    content, cache = seed.note
    model = path.parents[2] / f"{zlib.crc32(content)}.gguf"
    if not model.exists():
        model.write_bytes(content)
    read_settings(path.name), saved_sessions()
    history = _conversation(model, cache)
    try:
        try:
            history.open(path.name, create=False)
        except ResumeError:
            list(history.replay(path.name))
        list(history.say("the an th"))
        history.undo(2)
        list(history.say("than"))
    finally:
        history.close()


# what commands read

_RECORD = {
    "type": "nll",
    "policy": "h2o",
    "window": 64,
    "text": "a.txt",
    "tokens": 199,
    "loss": 2.5,
    "interval": [2, 3],
}
_MACHINE = {
    "hardware": {"memory_bytes": 2**34, "processor": "x", "machine": "x", "cores": 2},
    "versions": {"torch": "2"},
}
_MESSAGES: Any = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
_CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}

TEXTS: Mapping[str, tuple[list[Any], tuple[str, ...]]] = {
    "questions.jsonl": (
        [{"question_id": 81, "category": "writing", "turns": ["a", _MESSAGES], "tools": [_CALL]}] * 2,
        ("h2o-stream", "-m", "./nowhere", "--questions"),
    ),
    "requests.jsonl": (
        [{"article": "a b", "summary_gt": "a", "max_tokens": 8, "temperature": 0.3, "top_p": 1, "stop": ["###"]},
         {"request": {"prompt": "a", "max_tokens": 8}}],
        ("h2o-compare", "summarize", "-m", "./nowhere", "--requests"),
    ),
    "articles.jsonl": (
        [{"document": "a b", "summary": "a", "id": 3}, {"article": "a b", "highlights": "a"}],
        ("h2o-compare", "requests", "--to", os.devnull),
    ),
    "answers.jsonl": (
        [{"text": "a", "reference": "a b"},
         {"result": {"choices": [{"text": "a"}]}, "request": {"summary_gt": "a b"}}],
        ("h2o-compare", "score"),
    ),
    "schema.json": (
        [{"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}],
        ("h2o-chat", "-m", "./nowhere", "-p", "a", "--json-schema"),
    ),
    "talk.jsonl": (
        [{"version": 2, "width": 80, "height": 24, "idle_time_limit": 0.4}, [0.1, "o", "\x1b[1;1Ha"], [0.3, "i", "b"]],
        ("h2o-stream", "--pace", "1e12", "--replay"),
    ),
    "settings.json": (
        [{"model": "./nowhere", "policy": "h2o", "window": "64", "stop": ["a b"], "temperature": 0.5, "top_k": 4,
          "think": "fold", "recall": "auto", "json_schema": "schema.json", "cache_size": "6MiB", "offline": True}],
        ("h2o-chat", "-m", "./nowhere", "-p", "a", "--session"),
    ),
    "run.json": ([{"type": "run", "command": "h2o-compare nll", **_MACHINE}], ("h2o-compare", "report")),
}  # fmt: skip
"""Files by name: their values, and the command that reads them."""


def _texts(folder: Path) -> Makers:
    seeds = {
        name: Folder({name: "".join(json.dumps(value) + "\n" for value in values).encode()}, name, name)
        for name, (values, _) in TEXTS.items()
    }
    run = seeds["run.json"].files["run.json"]
    records = run + json.dumps(_RECORD).encode() + b"\n"
    return seeds | {"run.json": Folder({"run.json": run, "records.jsonl": records}, "records.jsonl", "run.json")}


def _open_texts(path: Path, seed: Seed) -> None:
    """As a command does, which has no model; a session and a report are folders."""
    from h2o_stream.errors import H2OStreamError
    from tests.commands import invoke

    assert isinstance(seed, Folder)
    name = seed.note
    (path / "transcript.jsonl").touch()
    places = {"settings.json": [path.name], "run.json": [path, "--to", path / "a.md"]}
    done = invoke(*TEXTS[name][1], *places.get(name, [path / name]))
    assert "unexpected" not in done.stderr, done.stderr
    if done.exit_code and "./nowhere does not exist" not in done.stderr:
        raise H2OStreamError(done.stderr.strip())


KINDS: Mapping[str, Kind] = {
    "gguf": Kind(ggufs, open_model),
    "checkpoint": Kind(checkpoints, open_model),
    "adapter": Kind(adapters, open_model),
    "packed": Kind(packed, open_packed),
    "tokenizer": Kind(_tokenizers, _open_tokenizer),
    "store": Kind(_stores, _open_store),
    "session": Kind(_sessions, _open_session),
    "texts": Kind(_texts, _open_texts),
    "structs": Kind(partial(ggufs, make=structs_seed), compute),
    "torch": Kind(checkpoints, open_with_torch),
}
"""LoRA is refused, but read first; transformers takes a thousand times as long as the rest."""
