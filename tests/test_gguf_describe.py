"""What transformers needs besides a GGUF file's weights: a tokenizer, created once and cached."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as T
from transformers import AutoTokenizer, GenerationConfig

from h2o_stream import H2OStreamError, ModelNotFoundError
from h2o_stream.models import gguf_export
from h2o_stream.models.find import find
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_export import export_tokenizer
from tests.gguf_files import MERGES, TOKENS, key, string


@pytest.fixture
def cache_folder(own_cache: Path) -> Path:
    return own_cache / "gguf"


class TestDescribed:
    def test_it_is_what_transformers_makes_of_the_file(self, small: Path, cache_folder: Path) -> None:
        folder = export_tokenizer(GgufFile(small), pytest.fail)
        assert sorted(path.name for path in folder.iterdir()) == [
            "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        ]  # fmt: skip
        ours, theirs = (
            AutoTokenizer.from_pretrained(folder),
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
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [2]

    def test_a_second_start_makes_nothing(self, small: Path, cache_folder: Path, monkeypatch: Any) -> None:
        first = export_tokenizer(GgufFile(small), pytest.fail)
        monkeypatch.setattr(gguf_export, "_export", lambda *_: pytest.fail("made again"))
        assert export_tokenizer(GgufFile(small), pytest.fail) == first

    def test_transformers_files_beside_it_are_ignored(self, small: Path, tmp_path: Path, cache_folder: Path) -> None:
        (tmp_path / "small.gguf").write_bytes(small.read_bytes())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_text("{}")
        folder = export_tokenizer(GgufFile(tmp_path / "small.gguf"), pytest.fail)
        assert len(AutoTokenizer.from_pretrained(folder)) == len(TOKENS)

    def test_two_at_once_make_one(self, small: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Path] = []

        def slowly(file: GgufFile, target: Path) -> None:
            made.append(target)
            time.sleep(0.3)
            (target / "config.json").write_text("{}")

        monkeypatch.setattr(gguf_export, "_export", slowly)
        said: list[str] = []
        found: list[Path] = []
        threads = [
            threading.Thread(target=lambda: found.append(export_tokenizer(GgufFile(small), said.append)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(set(found)), len(found), len(made)) == (1, 3, 1)
        assert any("Another program is reading small.gguf" in line for line in said)
        assert (found[0] / "config.json").exists()

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_a_failed_one_leaves_nothing(
        self, small: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        def fail(file: GgufFile, target: Path) -> None:
            (target / "config.json").write_text("{}")
            raise error

        monkeypatch.setattr(gguf_export, "_export", fail)
        expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else H2OStreamError
        with pytest.raises(expected, match="^$|small.gguf .* No space left on device"):
            export_tokenizer(GgufFile(small), pytest.fail)
        assert not [path for path in cache_folder.iterdir() if path.suffix != ".lock"]

    def test_a_read_only_cache(self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("not a folder")
        monkeypatch.setattr(gguf_export, "cache_folder", lambda: tmp_path / "file")
        with pytest.raises(H2OStreamError, match=r"tokenizer of small.gguf could not be written into .*file"):
            export_tokenizer(GgufFile(small), pytest.fail)

    @pytest.mark.parametrize(("old", "new"), [
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens"),
        (b"tokenizer.ggml.model", b"tokenizer.ggml.madel"),
        (string(b"th") + string(b"the"), string(b"\xff\xfe") + string(b"the")),
        (string(MERGES[0].encode()), string(b"t+h")),
        (string(MERGES[0].encode()), string(b"x!y")),
        (key("tokenizer.ggml.bos_token_id", T.UINT32, 1), key("tokenizer.ggml.bos_token_id", T.UINT32, 1 << 31)),
    ])  # fmt: skip
    def test_damaged_metadata(self, small: Path, tmp_path: Path, cache_folder: Path, old: bytes, new: bytes) -> None:
        content = small.read_bytes()
        assert old in content
        (tmp_path / "bad.gguf").write_bytes(content.replace(old, new))
        with pytest.raises(ModelNotFoundError, match=r"bad.gguf is damaged or not readable as GGUF: .") as error:
            export_tokenizer(GgufFile(tmp_path / "bad.gguf"), pytest.fail)
        assert "\n" not in str(error.value)
        assert not [path for path in cache_folder.iterdir() if path.suffix != ".lock"]


class TestFind:
    def test_a_file_is_found_as_it_is(self, small: Path, embedded_file: Path) -> None:
        assert find(str(small), True, pytest.fail) == str(small)
        assert find(str(small.parent), True, pytest.fail) == str(small)
        assert find("smollm2-135m", True, pytest.fail) == str(embedded_file)
