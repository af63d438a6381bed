"""Files and pipes as they come: texts in other encodings, documents that are no texts, and files that are no models."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest

from h2o_stream.base import texts
from h2o_stream.base.texts import piped_lines, piped_text, read_text
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.models import other_files
from h2o_stream.models.find import find
from h2o_stream.models.gguf import GgufFile
from h2o_stream.runtime.safetensors_files import checkpoint_files
from tests.commands import invoke
from tests.gguf_files import finish

TEXT = "Grüße aus Köln.\nZwei Zeilen, 日本."
CODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")


@pytest.mark.parametrize("reads", ["data[0]", "hashlib.sha256(data)", "zlib.crc32(data)"])
@pytest.mark.parametrize("where", ["{}()", "threading.Thread(target={}).start(); time.sleep(9)"])
def test_a_file_that_is_cut_short_while_it_is_mapped(tmp_path: Path, reads: str, where: str) -> None:
    """No exception says so; the process ends with a line, whichever thread reads, with Python's lock or without."""
    (tmp_path / "file").write_bytes(bytes(2**16))
    code = f"""import hashlib, mmap, threading, time, zlib
from h2o_stream.base.mapped_files import explain_bus_errors
explain_bus_errors("It is gone.\\n")
with open("file", "r+b") as file:
    data = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    {where.format(f"(lambda: {reads})")}"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (1, b"It is gone.\n")


def zipped(*names: str) -> bytes:
    """An archive without compression, most of which decodes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "plain words " * 200)
    return file.getvalue()


DOCUMENTS: dict[str, tuple[bytes, str]] = {
    "docx": (zipped("[Content_Types].xml", "word/document.xml"), "a document of Word that cannot be read"),
    "xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), "a workbook of Excel"),
    "zip": (zipped("a.txt"), "a zip archive; unpack it"),
    "tar": (b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + b"words " * 500, "a tar archive"),
    "pdf": (b"%PDF-1.7\n" + b"words " * 500, "a PDF that cannot be read"),
    "rtf": (b"{\\rtf1 words }", "a document in RTF"),
    "doc": (b"\xd0\xcf\x11\xe0\xa1\xb1" + b"words " * 500, "an old document of Office"),
    "gz": (b"\x1f\x8b\x08" + b"words " * 500, "a gzip archive"),
    "png": (b"\x89PNG\r\n\x1a\n" + b"words " * 500, "an image"),
    "gguf": (b"GGUF" + b"words " * 500, "a model; give it with --model"),
    "controls": (b"\1\2\3\4word" * 100, "control characters"),
}


class TestTexts:
    @pytest.mark.parametrize("coding", CODINGS)
    def test_encodings(self, tmp_path: Path, coding: str) -> None:
        for text in (TEXT, "Hello there."):
            data, path = text.encode(coding), tmp_path / "a.txt"
            path.write_bytes(data)
            assert read_text(path, "--file") == text
            assert piped_text(io.BytesIO(data), "standard input") == text
            lines = [line.rstrip("\n") for line in piped_lines(io.BytesIO(data), "standard input")]
            assert lines == text.split("\n")

    @pytest.mark.parametrize("text", ["", "a", "\0", "a\0", "a\0b", "日", "\ufeffa"])
    def test_short_ones_are_read(self, text: str) -> None:
        read = piped_text(io.BytesIO(text.encode()), "standard input")
        assert read == text.removeprefix("\ufeff") or "\0" in text
        list(piped_lines(io.BytesIO(text.encode()), "standard input"))

    @pytest.mark.parametrize("name", DOCUMENTS)
    def test_documents_are_named(self, tmp_path: Path, name: str) -> None:
        data, words = DOCUMENTS[name]
        path = tmp_path / f"a.{name}"
        path.write_bytes(data)
        for read in (
            lambda: read_text(path, f"/file {path}"),
            lambda: piped_text(io.BytesIO(data), "standard input"),
            lambda: list(piped_lines(io.BytesIO(data), "standard input")),
        ):
            with pytest.raises(DataError, match=words) as refused:
                read()
            assert "\n" not in str(refused.value)

    def test_what_has_no_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(texts, "_MAX_BYTES", 1 << 21)
        words = "Z has more than 2097152 bytes"
        with Path("/dev/zero").open("rb") as zeros:
            for read in (lambda: read_text(Path("/dev/zero"), "Z"), lambda: piped_text(zeros, "Z")):
                with pytest.raises(DataError, match=words):
                    read()

    def test_half_a_text(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="standard input: not UTF-16 at byte 4"):
            piped_text(io.BytesIO("aé".encode("utf-16")[:-1]), "standard input")
        (tmp_path / "a.txt").write_bytes("Köln".encode("latin-1"))
        with pytest.raises(DataError, match="--file: not UTF-8 at byte 1"):
            read_text(tmp_path / "a.txt", "--file")


class TestPipes:
    @pytest.mark.parametrize("coding", ["utf-8", "utf-16"])
    def test_a_question_about_a_piped_text(self, tiny_folder: Path, tmp_path: Path, coding: str) -> None:
        """The text comes first, then the question."""

        def prompt_tokens(*options: str, typed: Any = None) -> int:
            out = tmp_path / "out.jsonl"
            done = invoke("h2o-chat", "-m", tiny_folder, "-n", "1", "-q", "--jsonl", out, *options, typed=typed)
            assert done.exit_code == 0, done.stderr
            return int(json.loads(out.read_text().splitlines()[1])["prompt_tokens"])

        text = "Anna lives in Oslo.\n"
        typed: Any = text.encode(coding)
        both = prompt_tokens("-p", "Where?", typed=typed)
        assert both == prompt_tokens("-p", f"{text.strip()}\n\nWhere?") > prompt_tokens("-p", "Where?")

    def test_a_long_text_is_read_first(self, tiny_folder: Path) -> None:
        typed: Any = b"Nothing about rivers is said here.\n" * 60
        question = "Is anything said?\n\nAbout rivers?"
        done = invoke("h2o-chat", "-m", tiny_folder, "-n", "1", "--window", "128", "-p", question, typed=typed)
        assert done.exit_code == 0, done.stderr
        assert "read " in done.stderr.replace("reading", "")

    def test_noise_is_refused(self, tiny_folder: Path) -> None:
        typed: Any = DOCUMENTS["docx"][0]
        done = invoke("h2o-chat", "-m", tiny_folder, "-p", "Sum it up.", typed=typed)
        assert (done.exit_code, done.stdout) == (1, "")
        assert "standard input is a document of Word" in done.stderr


def written(path: Path, architecture: str = "llama", tensors: tuple[str, ...] = (), **keys: Any) -> Path:
    """A GGUF file with these keys (dots are two underscores) and empty tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        kinds = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        kinds[type(value)](key.replace("__", "."), value)
    for name in tensors:
        writer.add_tensor(name, numpy.zeros((8, 8), numpy.float32))
    finish(writer)
    return path


GGUFS: dict[str, tuple[dict[str, Any], str]] = {
    "projector": ({"architecture": "clip", "clip__has_vision_encoder": True, "tensors": ("v.patch_embd.weight",)},
                  "a projector"),
    "projector by its type": ({"general__type": "mmproj", "tensors": ("mm.0.weight",)}, "a projector"),
    "adapter": ({"general__type": "adapter", "adapter__type": "lora", "tensors": ("blk.0.attn_q.weight.lora_a",)},
                "an adapter"),
    "adapter by its tensors": ({"tensors": ("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b")}, "an adapter"),
    "imatrix": ({"general__type": "imatrix", "imatrix__chunk_count": 3, "tensors": ("blk.0.attn_q.weight.in_sum2",)},
                "an importance matrix"),
    "control vector": ({"architecture": "controlvector", "tensors": ("direction.1",)}, "a control vector"),
    "vocabulary": ({"tokenizer__ggml__tokens": ["a", "b"]}, "a vocabulary without a model"),
    "encoder": ({"architecture": "nomic-bert", "tensors": ("token_embd.weight",)}, "a model of embeddings"),
    "part": ({"split__no": 1, "split__count": 3, "tensors": ("a",)}, "part 2 of 3 of a model; name all parts like"),
}  # fmt: skip
FILES: dict[str, tuple[bytes, str]] = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n", "a pointer of Git LFS"),
    "page": (b"\n<!DOCTYPE html>\n<html><head></head></html>", "a web page; the download failed"),
    "comment": (b"<!-- x -->\n<HTML>", "a web page"),
    "message": (b"Entry not found", "a text that begins with 'Entry not found'; the download failed"),
    "json": (b'{"error":"Invalid username or password."}', "a text that begins with"),
    "empty": (b"", "an empty file"),
    "torch": (zipped("archive/data.pkl"), "a zip archive, or a checkpoint of torch.save"),
    "pickle": (b"\x80\x02}q\x00.", "a pickled checkpoint"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{"dtype":"F32"}}', "a file of safetensors; give its folder"),
    "ggml": (b"tjgg\3\0\0\0", "a file of llama.cpp before GGUF"),
    "old imatrix": (struct.pack("<ii", 3, 19) + b"blk.0.attn_q.weight", "an importance matrix"),
    "gz": (b"\x1f\x8b\x08", "a gzip archive"),
}
ADDRESSES = {
    "https://huggingface.co/org/a-GGUF/resolve/main/a-q4.gguf?download=true": "give org/a-GGUF:a-q4.gguf",
    "https://huggingface.co/org/a-GGUF/blob/main/sub/a-q4.gguf": "give org/a-GGUF:sub/a-q4.gguf",
    "https://hf.co/org/a": "give org/a", "https://huggingface.co/org/a/tree/main": "give org/a",
    "https://example.com/a.gguf": "download the file", "file:///models/a.gguf": "download the file, and give its path",
}  # fmt: skip


class TestModels:
    @pytest.mark.parametrize("name", GGUFS)
    def test_files_of_gguf_that_are_no_models(self, tmp_path: Path, name: str) -> None:
        keys, words = GGUFS[name]
        path = written(tmp_path / "a.gguf", **keys)
        with pytest.raises(H2OStreamError, match=f"a.gguf is {words}") as refused:
            GgufFile(path)
        assert "\n" not in str(refused.value)
        assert "damaged" not in str(refused.value)

    def test_a_part_of_no_number(self, tmp_path: Path) -> None:
        with pytest.raises(H2OStreamError, match="it is part 1 of 'x', which are no numbers"):
            GgufFile(written(tmp_path / "a.gguf", split__no=1, split__count="x", tensors=("a",)))

    @pytest.mark.parametrize("name", FILES)
    def test_other_files(self, tmp_path: Path, name: str) -> None:
        data, words = FILES[name]
        (tmp_path / "a.gguf").write_bytes(data)
        with pytest.raises(H2OStreamError, match=f"a.gguf is {words}") as refused:
            find(str(tmp_path / "a.gguf"), offline=True)
        assert "\n" not in str(refused.value)

    def test_a_pointer_in_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(FILES["lfs"][0])
        with pytest.raises(
            H2OStreamError, match=r"model.safetensors is a pointer of Git LFS, not the file itself; run"
        ):
            find(str(tmp_path), offline=True)

    @pytest.mark.parametrize(
        "name", ["model.safetensors", "generation_config.json", "tokenizer.json", "chat_template.jinja", "x.gguf"]
    )
    def test_what_has_no_end_in_a_folder(self, tmp_path: Path, name: str) -> None:
        if name != "x.gguf":
            (tmp_path / "config.json").write_text("{}")
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            make(tmp_path / name)
            with pytest.raises(H2OStreamError, match=f"{name} is neither a file nor a folder, and may have no end"):
                find(str(tmp_path), offline=True)
            (tmp_path / name).unlink()

    def test_a_text_that_is_too_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(other_files, "_MAX_TEXTS", 100)
        (tmp_path / "config.json").write_text(json.dumps({"a": "x" * 100}))
        with pytest.raises(H2OStreamError, match="config.json is a text of 109 bytes; files of models have 100"):
            find(str(tmp_path), offline=True)

    @pytest.mark.parametrize("named", ["../x.safetensors", "/dev/zero", "", ".", "..", "a/b.safetensors", 5, None])
    def test_an_index_that_names_other_files(self, tmp_path: Path, named: Any) -> None:
        index = {"weight_map": {"a": "model.safetensors", "b": named}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(DataError, match="which is no file of its folder"):
            checkpoint_files(tmp_path)

    def test_a_projector_beside_its_model(self, tmp_path: Path) -> None:
        written(tmp_path / "mmproj.gguf", "clip", tensors=("mm.0.weight",))
        model = written(tmp_path / "model.gguf", tensors=("token_embd.weight",))
        assert find(str(tmp_path), offline=True) == str(model)
        written(tmp_path / "other.gguf", tensors=("token_embd.weight",))
        with pytest.raises(H2OStreamError, match="has 2 .gguf files, name one of them"):
            find(str(tmp_path), offline=True)

    def test_a_part_without_the_others(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a-00002-of-00003.gguf", split__no=1, split__count=3, tensors=("a",))
        with pytest.raises(H2OStreamError, match=r"a-00002-of-00003.gguf is a part of a model, of which a-00001"):
            GgufFile(path)

    @pytest.mark.parametrize(("address", "words"), ADDRESSES.items())
    def test_addresses(self, address: str, words: str) -> None:
        with pytest.raises(H2OStreamError) as refused:
            find(address, offline=True)
        assert words in str(refused.value)

    def test_no_home(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("DATA", "CONFIG", "CACHE", "STATE"):
            monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
        monkeypatch.setenv("HOME", "/dev/null")
        done = invoke("h2o-chat", "-m", tiny_folder, "-p", "hi", "-n", "2", "-q")
        assert done.exit_code == 0, done.stderr
        done = invoke("h2o-chat", "-m", tiny_folder, "-p", "hi", "--session", "a")
        assert done.exit_code == 1
        assert "session a" in done.stderr
