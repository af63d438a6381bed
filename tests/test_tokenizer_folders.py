"""Tokenizers and generation configs of checkpoint folders, without transformers, as it reads them."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from h2o_stream import ModelNotFoundError
from h2o_stream.models.file_tokenizers import file_tokenizer
from h2o_stream.models.generation_config import GenerationConfig, read_generation_config
from h2o_stream.models.gguf import GgufFile
from tests.fixtures import make_llama
from tests.in_turn import in_turn
from tests.test_tokenizer_files import CHAT, TOOLS, assert_same, rendered


def word_level(**more: Any) -> Any:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **more)


VOCAB = {
    token: number for number, token in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "th", "the", "<|endoftext|>"])
}
PAIRS = [("t", "h"), ("th", "e")]
EVERY = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), "<|endoftext|>")
"""All special tokens by name."""

READ: dict[str, Callable[[], Any]] = {
    "words": lambda: word_level(unk_token="<unk>", eos_token="<end>"),
    "special tokens": lambda: word_level(
        eos_token=AddedToken("<end>", lstrip=True, special=True), extra_special_tokens=["<a>", "<b>"], image_token="<i>"
    ),
    "named special tokens": lambda: word_level(extra_special_tokens={"audio_token": "<a>"}),
    "Qwen2": lambda: Qwen2Tokenizer(VOCAB, PAIRS, **EVERY | {"bos_token": None}),
    "GPT-2": lambda: GPT2Tokenizer(VOCAB, PAIRS, **EVERY),
    "many templates": lambda: word_level(chat_template={"default": "{{ 1 }}", "tool_use": "{{ tools | tojson }}"}),
}  # fmt: skip


class TestFolders:
    @in_turn("name", READ)
    def test_as_transformers_reads_them(self, name: str, tmp_path: Path) -> None:
        READ[name]().save_pretrained(tmp_path)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ours = file_tokenizer(tmp_path)
        assert ours is not None
        theirs("stops truncating and padding")
        assert_same(ours, theirs)
        assert ours.extra_special_tokens == theirs.extra_special_tokens
        if theirs.chat_template:
            for tools in (None, TOOLS):
                assert ours.get_chat_template(tools) == theirs.get_chat_template(tools=tools)
                assert rendered(ours, CHAT, tools=tools) == rendered(theirs, CHAT, tools=tools)

    def test_configs_of_older_versions(self, tmp_path: Path) -> None:
        """Tokens with flags of their own, templates in the config, and special tokens in another file."""
        word_level(unk_token="<unk>").save_pretrained(tmp_path)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "pad_token": None,
            "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False,
                          "rstrip": False, "single_word": False},
            "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
        }  # fmt: skip
        token = {"content": "hello", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
        added = {"3": token | {"content": "<new>", "special": True}, "1": token | {"special": False}}
        for number, change in enumerate(({"added_tokens_decoder": added}, {})):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change))
            special = {"eos_token": token | {"content": "<e>"}, "additional_special_tokens": ["<x>"]}
            (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
            theirs = AutoTokenizer.from_pretrained(tmp_path)
            theirs("stops truncating and padding")
            ours = file_tokenizer(tmp_path)
            assert ours is not None
            assert ours.special_tokens_map == theirs.special_tokens_map
            assert ours.special_tokens_map.get("eos_token") == (None, "<e>")[number]
            assert ours.chat_template == theirs.chat_template == {"default": "a", "tool_use": "b"}
            assert ours("hello <new> <e>  <x>") == {"input_ids": theirs("hello <new> <e>  <x>")["input_ids"]}

    def test_what_transformers_makes_itself(self, tmp_path: Path) -> None:
        """These classes take only the vocabulary from the file."""
        other = Qwen2Tokenizer(VOCAB, PAIRS, **EVERY)
        other.backend_tokenizer.normalizer = normalizers.NFKC()
        for number, tokenizer in enumerate([
            LlamaTokenizer({"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3}, []), other, GPT2Tokenizer(VOCAB, PAIRS, **EVERY),
        ]):  # fmt: skip
            tokenizer.save_pretrained(tmp_path / str(number))
        (tmp_path / "2" / "config.json").write_text('{"model_type": "qwen3"}')
        assert [file_tokenizer(tmp_path / str(number)) for number in range(3)] == [None] * 3
        assert file_tokenizer(tmp_path) is None

    def test_damaged_ones(self, tmp_path: Path) -> None:
        word_level().save_pretrained(tmp_path)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            (tmp_path / name).write_text('{"a": ')
            with pytest.raises(ModelNotFoundError, match="the tokenizer in .* cannot be read: "):
                file_tokenizer(tmp_path)


class TestGenerationConfig:
    def test_as_transformers_reads_it(self, tmp_path: Path) -> None:
        wanted: dict[str, Any] = {
            "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
            "eos_token_id": [1, 2],
        }  # fmt: skip
        for values in (wanted, {"eos_token_id": 5}, {}):
            transformers.GenerationConfig(**values, do_sample=True).save_pretrained(tmp_path)
            theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
            ours = asdict(read_generation_config(tmp_path))
            assert ours == {name: getattr(theirs, name) for name in ours}
            assert ours.keys() == wanted.keys()

    def test_of_a_model_without_one(self, tmp_path: Path) -> None:
        make_llama().config.save_pretrained(tmp_path)
        assert read_generation_config(tmp_path) == GenerationConfig(eos_token_id=2)

    def test_of_a_file(self, small: Path) -> None:
        assert read_generation_config(GgufFile(small)) == GenerationConfig(eos_token_id=[2])

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(ModelNotFoundError, match=r"generation_config.json cannot be read: "):
            read_generation_config(tmp_path)
