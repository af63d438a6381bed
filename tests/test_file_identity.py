"""The identity of files: other content has another one, even with equal names, sizes and times."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFValueType
from safetensors.torch import save_file

from h2o_stream.loading.hf_config import hf_config
from h2o_stream.models.file_identity import model_identity
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_tokenizer import gguf_tokenizer
from h2o_stream.models.packed_cache import packed_folder
from h2o_stream.runtime.gguf_parameters import parameters_of_gguf
from tests.fixtures import make_llama
from tests.gguf_files import key, write_model

T = GGUFValueType
TIME_NS = 1
EOS = "tokenizer.ggml.eos_token_id"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "original" / "model.gguf"
    path.parent.mkdir()
    write_model(path, make_llama(), "llama")
    os.utime(path, ns=(TIME_NS, TIME_NS))
    return path


def changed(original: Path, old: bytes, new: bytes) -> Path:
    """A file with the name, size and time of another one, and other content."""
    content = original.read_bytes()
    assert old in content
    return copied(original, content.replace(old, new))


def copied(original: Path, content: bytes) -> Path:
    path = original.parent.parent / "changed" / original.name
    path.parent.mkdir()
    path.write_bytes(content)
    os.utime(path, ns=(TIME_NS, TIME_NS))
    assert path.stat().st_size == original.stat().st_size
    return path


def read_all(path: Path) -> tuple[Any, Any]:
    file = GgufFile(path)
    return hf_config(file, parameters_of_gguf(file)), gguf_tokenizer(file)


def base(value: float) -> bytes:
    return key("llama.rope.freq_base", T.FLOAT32, struct.pack("<f", value))


class TestGguf:
    @pytest.mark.parametrize(("old", "new", "read", "values"), [
        (b"{{ message.content }}", b"{{ message['role'] }}",
            lambda config, tokenizer: "role" in tokenizer.chat_template, [False, True]),
        (b"<more7>", b"<less7>",
            lambda config, tokenizer: "<less7>" in tokenizer.backend_tokenizer.get_vocab(), [False, True]),
        (base(10000), base(50000), lambda config, tokenizer: config.rope_parameters["rope_theta"], [10000, 50000]),
        (key(EOS, T.UINT32, 2), key(EOS, T.UINT32, 1), lambda config, tokenizer: config.eos_token_id, [2, 1]),
    ], ids=["template", "vocabulary", "base of RoPE", "end"])  # fmt: skip
    def test_all_of_it_is_of_its_own(
        self, original: Path, old: bytes, new: bytes, read: Any, values: list[Any]
    ) -> None:
        other = changed(original, old, new)
        assert [read(*read_all(path)) for path in (original, other)] == values

    def test_what_states_know_it_by(self, embedded_file: Path) -> None:
        """The whole digest is an exhaustive test of `test_runtime`."""
        config = hf_config(file := GgufFile(embedded_file), parameters_of_gguf(file)).to_dict()
        assert config["_model_name_or_path"] == "Smollm2 135M 8k Lc100K Mix1 Ep2"
        assert config["unk_token_id"] == 0

    def test_a_changed_weight_in_the_middle_of_a_tensor(self, original: Path, own_cache: Path) -> None:
        tensor = GgufFile(original).tensors["blk.1.ffn_up.weight"]
        content = bytearray(original.read_bytes())
        content[tensor.offset + tensor.nbytes // 2] ^= 1
        other = copied(original, bytes(content))
        assert model_identity(original) != model_identity(other)
        folders = {packed_folder("model.gguf", path, "gguf") for path in (original, other)}
        assert len(folders) == 2

    def test_a_copy_is_the_same(self, original: Path) -> None:
        copy = copied(original, original.read_bytes())
        assert model_identity(copy) == model_identity(original) == model_identity(GgufFile(copy))

    def test_another_time_or_size(self, original: Path) -> None:
        found = {model_identity(original)}
        os.utime(original, ns=(TIME_NS, TIME_NS + 1))
        found.add(model_identity(original))
        original.write_bytes(original.read_bytes() + b"\0")
        os.utime(original, ns=(TIME_NS, TIME_NS + 1))
        found.add(model_identity(original))
        assert len(found) == 3

    def test_it_is_read_once(self, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = model_identity(original)
        monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("read again"))
        assert model_identity(original) == first

    def test_a_large_file_is_sampled(self, tmp_path: Path) -> None:
        path = tmp_path / "large.bin"
        with path.open("wb") as file:
            file.truncate(1 << 33)
        counted: list[int] = []
        from h2o_stream.models import file_identity

        with path.open("rb") as file:
            counted += [count for _, count in file_identity._covered(path, file, 1 << 33, None)]
        assert sum(counted) < 1 << 21
        model_identity(path)


class TestFolder:
    def folder(self, path: Path, config: dict[str, Any], weight: torch.Tensor) -> Path:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        (path / "notes.txt").write_text(path.name)
        save_file({"some": torch.zeros(5000), "weight": weight}, path / "model.safetensors")
        for file in path.iterdir():
            os.utime(file, ns=(TIME_NS, TIME_NS))
        return path

    def test_configs_and_weights_count(self, tmp_path: Path) -> None:
        weight = torch.zeros(1 << 20)
        first = self.folder(tmp_path / "first", {"theta": 1}, weight)
        same = self.folder(tmp_path / "same", {"theta": 1}, weight)
        config = self.folder(tmp_path / "config", {"theta": 2}, weight)
        weight[len(weight) // 2] = 1
        other = self.folder(tmp_path / "other", {"theta": 1}, weight)
        assert model_identity(first) == model_identity(same)
        assert len({model_identity(folder) for folder in (first, config, other)}) == 3

    def test_a_damaged_header_is_left_to_loading(self, tmp_path: Path) -> None:
        for index, data in enumerate([b"", b"\xff" * 20, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 3) + b'"x"']):
            path = tmp_path / f"{index}.safetensors"
            path.write_bytes(data)
            assert len(model_identity(path)) == 16
