"""What transformers needs besides a GGUF file's weights: a tokenizer, and how a reply ends."""

import json
from pathlib import Path

import pytest
from gguf import GGUFValueType as T
from transformers import AutoTokenizer

from h2o_stream import ModelNotFoundError
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load, load_tokenizer
from h2o_stream.models.find import find
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_tokenizer import gguf_tokenizer
from tests.gguf_files import MERGES, TOKENS, key, string


class TestDescribed:
    def test_it_is_what_transformers_makes_of_the_file(self, small: Path) -> None:
        ours, theirs = (
            load_tokenizer(ModelConfig(str(small))),
            AutoTokenizer.from_pretrained(small.parent, gguf_file=small.name),
        )
        assert len(theirs) == len(TOKENS) + 1, "transformers adds <|endoftext|>, which the model does not have"
        assert ours.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
        for part in ("normalizer", "post_processor", "decoder", "model"):
            first, second = (json.loads(each.backend_tokenizer.to_str())[part] for each in (ours, theirs))
            assert first == second
        splits = [each.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It's  2 or 34") for each in (ours, theirs)]
        assert splits[0] == splits[1]
        assert (ours.bos_token, ours.eos_token, ours.chat_template) == ("<s>", "</s>", theirs.chat_template)
        assert ours.tokenize("the an") == ["the", "Ġ", "an"]

    def test_how_replies_end(self, small: Path) -> None:
        generation = load(ModelConfig(str(small), device="cpu")).model.generation_config
        assert (generation.bos_token_id, generation.eos_token_id) == (1, [2])

    def test_transformers_files_beside_it_are_ignored(self, small: Path, tmp_path: Path) -> None:
        (tmp_path / "small.gguf").write_bytes(small.read_bytes())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_text("{}")
        assert len(load_tokenizer(ModelConfig(str(tmp_path / "small.gguf")))) == len(TOKENS)

    @pytest.mark.parametrize(("old", "new"), [
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.madel"),
        (string(b"th") + string(b"the"), string(b"\xff\xfe") + string(b"the")),
        (string(MERGES[0].encode()), string(b"t+h")),
        (string(MERGES[0].encode()), string(b"x!y")),
        (key("tokenizer.ggml.bos_token_id", T.UINT32, 1), key("tokenizer.ggml.bos_token_id", T.UINT32, 1 << 31)),
    ])  # fmt: skip
    def test_damaged_metadata(self, small: Path, tmp_path: Path, old: bytes, new: bytes) -> None:
        content = small.read_bytes()
        assert old in content
        (tmp_path / "bad.gguf").write_bytes(content.replace(old, new))
        with pytest.raises(ModelNotFoundError, match=r"bad.gguf is damaged or not readable as GGUF: .") as error:
            gguf_tokenizer(GgufFile(tmp_path / "bad.gguf"))
        assert "\n" not in str(error.value)


class TestFind:
    def test_a_file_is_found_as_it_is(self, small: Path, embedded_file: Path) -> None:
        assert find(str(small), True, pytest.fail) == str(small)
        assert find(str(small.parent), True, pytest.fail) == str(small)
        assert find("smollm2-135m", True, pytest.fail) == str(embedded_file)
