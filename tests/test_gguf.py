"""GGUF files: invalid headers, and tensor views."""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValueType

from h2o_stream import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models import gguf as gguf_module
from h2o_stream.models.file_identity import model_identity
from h2o_stream.models.find import find
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_header import SkippedArray
from tests.gguf_files import ROW, QuickReader, array, composed, finish, key, split, string, tensor
from tests.in_turn import in_turn

T = GGUFValueType
HUGE = 1 << 63


def le(number: int) -> bytes:
    return struct.pack("<Q", number)


def two(**second: object) -> bytes:
    return composed(tensors=(tensor("a"), tensor(**{"name": "b", "offset": ROW, **second})), data=bytes(2 * ROW))


HOSTILE = {
    "empty": (b"", "starts with b''"),
    "one byte": (b"G", "starts with b'G'"),
    "magic": (composed(magic=b"GGML"), "starts with b'GGML'"),
    "a web page": (b"<!doctype html>", "starts with b'<!do'"),
    "only magic": (b"GGUF", "the version ends at 8, the file at 4"),
    "version 1": (composed(version=struct.pack("<I", 1)), "version is 1"),
    "version 2^32-1": (composed(version=b"\xff" * 4), "version is 4294967295"),
    "big-endian": (composed(version=struct.pack(">I", 3)), "big-endian"),
    "2^63 tensors": (composed(num_tensors=HUGE), f"{HUGE} tensors, more than"),
    "2^64-1 keys": (composed(num_keys=2**64 - 1), f"{2**64 - 1} keys, more than"),
    "more tensors than fit": (composed(num_tensors=9), "9 tensors do not fit into"),
    "more keys than fit": (composed(num_keys=1000), "1000 keys do not fit into"),
    "a key too few": (composed(num_keys=2), "key 1 is empty"),
    "a tensor too many": (composed(tensors=(tensor(),), num_tensors=2), "the name of tensor 1 is empty"),
    "a key of 2^63 bytes": (composed(le(HUGE) + bytes(5)), f"key 1 is a string of {HUGE} bytes"),
    "a key past the end": (composed(le(65000) + bytes(5)), "key 1 ends at .*, the file at"),
    "a key not in UTF-8": (composed(key("x", T.UINT8, b"1").replace(b"x", b"\xff")), "key 1 is not UTF-8"),
    "a key twice": (composed(key("x", T.UINT8, b"1"), key("x", T.UINT8, b"1")), "key x is duplicated"),
    "a string past the end": (composed(string(b"x") + struct.pack("<IQ", 8, 1 << 20)), "x ends at"),
    "a string of 2^63 bytes": (composed(string(b"x") + struct.pack("<IQ", 8, HUGE)), f"a string of {HUGE} bytes"),
    "a value of type 13": (composed(key("x", 13, bytes(8))), "x is a value of type 13"),
    "a value of type 2^32-1": (composed(key("x", 2**32 - 1, bytes(8))), "x is a value of type 4294967295"),
    "an array of arrays": (composed(key("x", T.ARRAY, array(T.ARRAY, 1, array(4, 1)))), "x is an array of arrays"),
    "an array of type 99": (composed(key("x", T.ARRAY, array(99, 1))), "x is a value of type 99"),
    "2^63 bytes": (composed(key("x", T.ARRAY, array(T.UINT8, HUGE))), f"{HUGE} values in x, more than"),
    "2^61 numbers": (composed(key("x", T.ARRAY, array(T.UINT64, 1 << 61))), "values in x, more than"),
    "numbers past the end": (composed(key("x", T.ARRAY, array(T.UINT64, 1000))), "1000 values in x do not fit"),
    "2^60 strings": (composed(key("x", T.ARRAY, array(T.STRING, 1 << 60))), "strings in x, more than"),
    "strings past the end": (composed(key("x", T.ARRAY, array(T.STRING, 1000))), "1000 strings in x do not fit"),
    "a string in an array of 2^63 bytes": (
        composed(key("x", T.ARRAY, array(T.STRING, 2, le(HUGE) + le(0)))),
        "string 1 of 2 in x is at",
    ),
    "the last string of 2^64-1 bytes": (composed(key("x", T.ARRAY, array(T.STRING, 1, le(2**64 - 1)))), "x ends at"),
    "no architecture": (composed().replace(b"architecture", b"architektura"), "general.architecture is None"),
    "an architecture of bytes": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key("general.architecture", T.UINT32, 7),
        "general.architecture is 7",
    ),
    "alignment 0": (composed(key("general.alignment", T.UINT32, 0)), "general.alignment is 0"),
    "alignment 3": (composed(key("general.alignment", T.UINT32, 3)), "general.alignment is 3"),
    "alignment 2^40": (composed(key("general.alignment", T.UINT64, le(1 << 40))), "general.alignment is 1099511627776"),
    "alignment 32.0": (composed(key("general.alignment", T.FLOAT32, struct.pack("<f", 32))), "alignment is 32.0"),
    "0 dimensions": (two(dims=()), "tensor b has 0 dimensions"),
    "5 dimensions": (two(dims=(1, 1, 1, 1, 8)), "tensor b has 5 dimensions"),
    "2^32-1 dimensions": (two(count=2**32 - 1), "tensor b has 4294967295 dimensions"),
    "a dimension of 0": (two(dims=(8, 0)), r"tensor b has the shape \(0, 8\)"),
    "2^64 numbers": (two(dims=(1 << 32, 1 << 32)), f"tensor b has {1 << 66} bytes"),
    "2^252 numbers": (two(dims=(HUGE,) * 4), f"tensor b has {1 << 254} bytes"),
    "half a block": (two(dims=(8,), kind=2), "rows of 8 numbers, not of whole blocks of 32"),
    "an offset past the end": (two(offset=4 * ROW), "the file ends at"),
    "an offset of 2^64-32": (two(offset=2**64 - 32), "the file ends at"),
    "an offset between": (two(offset=ROW + 4), "tensor b is at 36, not a multiple of 32"),
    "a tensor twice": (two(name="a"), "tensor a is duplicated"),
    "two in one place": (two(offset=0), r"tensor b starts at \d+, a ends at"),
    "cut in the last tensor": (two()[:-1], "tensor b has 32 bytes"),
}


class TestHostile:
    def test_the_composer_makes_good_files(self, tmp_path: Path) -> None:
        (tmp_path / "good.gguf").write_bytes(two())
        assert [good.shape for good in GgufFile(tmp_path / "good.gguf").tensors.values()] == [(8,), (8,)]

    @in_turn("name", HOSTILE)
    def test_one_clear_line(self, tmp_path: Path, name: str) -> None:
        data, words = HOSTILE[name]
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(
            ModelNotFoundError, match=f"bad.gguf is damaged or not readable as GGUF: .*{words}"
        ) as error:
            GgufFile(path)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("kind", [4, 31, 2**32 - 1])
    def test_unknown_types_of_tensors(self, tmp_path: Path, kind: int) -> None:
        (tmp_path / "new.gguf").write_bytes(two(kind=kind))
        with pytest.raises(UnsupportedModelError, match=f"new.gguf cannot be served: tensor b has type {kind}"):
            GgufFile(tmp_path / "new.gguf")

    def test_one_file_of_many_with_another_name(self, tmp_path: Path) -> None:
        (tmp_path / "part.gguf").write_bytes(composed(key("split.count", T.UINT16, struct.pack("<H", 3))))
        with pytest.raises(
            ModelNotFoundError, match="part . of 3 of a model; name all parts like model-00001-of-00003.gguf"
        ):
            GgufFile(tmp_path / "part.gguf")

    def test_split_files(self, small: Path, tmp_path: Path) -> None:
        parts = split(small, tmp_path, 3)
        whole = GgufFile(small)
        for path in parts:
            file = GgufFile(path)
            assert (file.path, file.nbytes) == (parts[0], whole.nbytes)
            for name, wanted in whole.tensors.items():
                assert file.blocks(file.tensors[name]).tobytes() == whole.blocks(wanted).tobytes()
        assert find(str(tmp_path), offline=True) == str(parts[0])
        identity = model_identity(parts[0])
        assert identity == model_identity(parts[2])
        data = parts[1].read_bytes()
        parts[1].write_bytes(data[:-4] + b"\1\1\1\1")
        assert model_identity(parts[0]) != identity
        parts[1].write_bytes(data[:-40])
        with pytest.raises(ModelNotFoundError, match="00002-of-00003.gguf is damaged"):
            GgufFile(parts[0])
        parts[1].unlink()
        with pytest.raises(ModelNotFoundError, match="of which .*00002-of-00003.gguf is not beside it"):
            GgufFile(parts[0])

    def test_a_folder_and_nothing(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "nothing.gguf"):
            with pytest.raises(ModelNotFoundError, match="cannot be read: (Is a directory|No such file)"):
                GgufFile(path)

    def test_cut_while_it_is_read(self, small: Path, tmp_path: Path) -> None:
        path = tmp_path / "cut.gguf"
        path.write_bytes(small.read_bytes())
        file = GgufFile(path)
        *_, last = file.tensors.values()
        os.truncate(path, last.offset + last.nbytes - 1)
        with pytest.raises(ModelNotFoundError, match="it was cut short, to .* bytes, while it was read"):
            file.blocks(last)

    def test_cut_anywhere(self, small: Path, tmp_path: Path) -> None:
        whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
        for size in [*range(0, 200), *range(200, len(whole), 97), len(whole) - 1]:
            cut.write_bytes(whole[:size])
            with pytest.raises(ModelNotFoundError, match="damaged"):
                GgufFile(cut)


class TestFile:
    def test_it_reads_what_the_package_gguf_reads(self, embedded_file: Path) -> None:
        ours, reader = GgufFile(embedded_file), QuickReader(embedded_file)
        assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
        for theirs in reader.tensors[:20]:
            tensor = ours.tensors[theirs.name]
            assert (tensor.type, tensor.shape) == (theirs.tensor_type, tuple(theirs.shape.tolist()[::-1]))
            assert (tensor.offset, tensor.nbytes) == (theirs.data_offset, theirs.n_bytes)
            assert np.array_equal(ours.blocks(tensor), theirs.data.view(np.uint8).ravel())
        assert {key: ours.metadata[key] for key in ("llama.block_count", "general.name")} == {
            key: reader.fields[key].contents() for key in ("llama.block_count", "general.name")
        }
        for name, kind in {"tokens": GGUFValueType.STRING, "token_type": GGUFValueType.INT32}.items():
            skipped = ours.metadata[f"tokenizer.ggml.{name}"]
            assert isinstance(skipped, SkippedArray)
            assert (skipped.type, skipped.count) == (kind, 49152)
        assert (ours.architecture, ours.quantized) == ("llama", True)
        assert 0.95 * embedded_file.stat().st_size < ours.nbytes < embedded_file.stat().st_size

    def test_headers_are_read_fast(self, embedded_file: Path) -> None:
        begun = time.process_time()
        GgufFile(embedded_file)
        assert time.process_time() - begun < 1, "0.02 s on a quiet machine, gguf's own reader takes 3 s"

    def test_files_of_plain_numbers_are_not_quantized(self, small: Path) -> None:
        assert not GgufFile(small).quantized

    def test_long_arrays_are_read_on_demand(self, embedded_file: Path) -> None:
        file = GgufFile(embedded_file)
        tokens, types = file.array("tokenizer.ggml.tokens"), file.array("tokenizer.ggml.token_type")
        assert (tokens[:3], tokens[-1]) == (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "ectable")
        assert (len(tokens), types) == (49152, [3] * 17 + [1] * 49135)

    def test_arrays_that_are_short_missing_or_none(self, tmp_path: Path) -> None:
        numbers = key("numbers", T.ARRAY, array(T.UINT32, 2, struct.pack("<II", 7, 8)))
        names = key("names", T.ARRAY, array(T.STRING, 2, string(b"ok") + string(b"\xff")))
        (tmp_path / "some.gguf").write_bytes(composed(numbers, names))
        file = GgufFile(tmp_path / "some.gguf")
        assert (file.array("numbers"), file.array("nothing")) == ([7, 8], [])
        with pytest.raises(ModelNotFoundError, match="damaged .*names: string 1 is not UTF-8 at byte 155"):
            file.array("names")
        with pytest.raises(ModelNotFoundError, match="damaged .*general.architecture is 'llama', not an array"):
            file.array("general.architecture")

    def test_views_do_not_warn_and_forgotten_ones_come_back(
        self, embedded_file: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        file = GgufFile(embedded_file)
        for some in list(file.tensors.values())[:3]:
            before = file.blocks(some).copy()
            file.release(some)
            assert np.array_equal(file.blocks(some), before)
        assert not recwarn.list

    def test_forgotten_pages_are_not_resident(self, embedded_file: Path) -> None:
        file = GgufFile(embedded_file)
        table = file.tensors["token_embd.weight"]
        file.blocks(table).sum()
        touched = resident_of(embedded_file)
        file.release(table)
        assert resident_of(embedded_file) < touched - 0.9 * table.nbytes

    @pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
    @pytest.mark.parametrize("fits", [True, False])
    def test_the_system_forgets_what_does_not_fit_twice(
        self, fits: bool, embedded_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spans: list[tuple[int, ...]] = []
        monkeypatch.setattr(os, "posix_fadvise", lambda _, *span: spans.append(span))
        file = GgufFile(embedded_file)
        monkeypatch.setattr(gguf_module, "free_bytes", lambda: (3 if fits else 1.5) * file.nbytes)
        table = file.tensors["token_embd.weight"]
        file.release(table)
        start = table.offset // mmap.PAGESIZE * mmap.PAGESIZE
        span = (start, table.offset + table.nbytes - start, os.POSIX_FADV_DONTNEED)
        assert spans == ([] if fits else [span])

    def test_other_alignments(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
        writer.add_custom_alignment(256)
        for index in range(3):
            writer.add_tensor(f"t{index}", torch.full((5,), float(index)).numpy())
        finish(writer)
        file = GgufFile(tmp_path / "wide.gguf")
        for index, some in enumerate(file.tensors.values()):
            assert some.offset % 256 == 0
            assert file.blocks(some).view(np.float32).tolist() == [index] * 5


def resident_of(path: Path) -> int:
    """Resident bytes of a mapped file in this process."""
    lines: Iterator[str] = iter(Path("/proc/self/smaps").read_text().splitlines())
    return 1024 * sum(
        next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
        for line in lines
        if line.endswith(str(path.resolve()))
    )
