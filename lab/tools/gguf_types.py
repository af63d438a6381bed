"""The embedded model in every GGUF type: our loss against llama.cpp's on the same file and tokens.

``python -m lab.tools.gguf_types`` writes the table in lab/docs/performance.md (``make gguf-table``). llama.cpp's own
quantizer creates the files in a temporary folder. Rows of 576 columns are not a multiple of the 256-element blocks of
some types; llama.cpp then falls back to other types, and the table lists how many matrices have which type.
"""

import argparse
import ctypes
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize
from torch import Tensor
from torch.nn.functional import cross_entropy

from h2o_stream import CacheConfig, attach
from h2o_stream.base.resources import python_manual
from h2o_stream.compare.nll import read_tokens
from h2o_stream.config import DEFAULT_MODEL, ModelConfig
from h2o_stream.loading.transformers_model import load, load_tokenizer
from h2o_stream.models.find import gguf_file

TYPES = {
    **{name: f"MOSTLY_{name}" for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K")},
    **{"Q3_K": "MOSTLY_Q3_K_M", "Q4_K": "MOSTLY_Q4_K_M", "Q4_K_M": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M"},
    **{"Q6_K": "MOSTLY_Q6_K", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "F32": "ALL_F32"},
}
"""Names of `LlamaFileType`."""

_PURE = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
"""Types used for every matrix that allows it, instead of llama.cpp's mix with higher-precision types."""

BEGIN, END = "<!-- gguf types -->\n", "<!-- end of gguf types -->\n"

_BATCH_SIZE = 512
"""Tokens per forward."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: name of the type.
        matrices: number of matrices of each type.
        size: size of the file in bytes.
        theirs: llama.cpp's mean loss per token, in nats.
        prompt: our loss with long prompts.
        steps: our loss token by token.
        note: engine that ran the steps.
    """

    name: str
    matrices: Counter[str]
    size: int
    theirs: float
    prompt: float
    steps: float
    note: str

    def __str__(self) -> str:
        held = ", ".join(f"{count} {name}" for name, count in self.matrices.most_common())
        ours = " | ".join(f"{loss:.4f} | {loss - self.theirs:+.4f}" for loss in (self.prompt, self.steps))
        return f"| {self.name} | {held} | {self.size / 1e6:.0f} | {self.theirs:.4f} | {ours} |"


def in_float32(source: Path, target: Path) -> None:
    """Write a copy of a GGUF file with all weights in float32."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(source: Path, target: Path, name: str) -> None:
    """Quantize a file to one of `TYPES` with llama.cpp."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure = int(LlamaFileType[TYPES[name]]), name in _PURE
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), None)
    assert not failed, f"llama.cpp could not make {name}"


def matrices_of(file: Path) -> Counter[str]:
    """The number of matrices of each type."""
    tensors = (tensor for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1)
    return Counter(GGMLQuantizationType(tensor.tensor_type).name for tensor in tensors)


def their_loss(file: Path, tokens: Sequence[int]) -> float:
    """llama.cpp's mean loss over all tokens but the first."""
    import llama_cpp

    threads = os.cpu_count()
    llama = llama_cpp.Llama(
        str(file), n_ctx=len(tokens), n_batch=_BATCH_SIZE, n_threads=threads, n_threads_batch=threads, logits_all=True,
        verbose=False,
    )  # fmt: skip
    llama.eval(list(tokens))
    loss = _mean(torch.from_numpy(llama.scores[: len(tokens) - 1]), tokens)
    llama.close()
    return loss


def our_losses(file: Path, tokens: Sequence[int], dtype: str) -> tuple[float, float, str]:
    """Our loss with long prompts, our loss token by token without evictions, and the engine that ran the steps."""
    model = load(ModelConfig(model=str(file), dtype=dtype, device="cpu", offline=True)).model
    prompt = _mean(_logits(model, CacheConfig("full"), tokens, _BATCH_SIZE)[0], tokens)
    logits, note = _logits(model, CacheConfig("recent", window=len(tokens)), tokens, 1)
    return prompt, _mean(logits, tokens), note


@torch.no_grad()
def _logits(model: Any, config: CacheConfig, tokens: Sequence[int], step: int) -> tuple[Tensor, str]:
    """Logits [n - 1, V] float32 of all tokens but the last, fed `step` at a time, and the engine that ran the steps."""
    fed = torch.tensor([tokens[:-1]])
    with attach(model, config) as cache:
        chunks = [model(ids, past_key_values=cache).logits[0].float() for ids in fed.split(step, 1)]
        return torch.cat(chunks), str(getattr(cache, "engine_note", ""))


def _mean(logits: Tensor, tokens: Sequence[int]) -> float:
    targets = torch.tensor(tokens[1:])
    pairs = zip(logits.split(_BATCH_SIZE), targets.split(_BATCH_SIZE), strict=True)
    return float(torch.cat([cross_entropy(rows, ids, reduction="none") for rows, ids in pairs]).double().mean())


def rows(names: Sequence[str], text: Path | None, count: int, dtype: str) -> Iterator[Row]:
    """Yield the rows of the table.

    Args:
        names: names from `TYPES`.
        text: text file; None for the Python manual.
        count: number of predicted tokens.
        dtype: dtype of our model's activations and cache.
    """
    source = gguf_file(DEFAULT_MODEL)
    assert source is not None, "make setup installs the embedded model"
    with tempfile.TemporaryDirectory(prefix="gguf-types-") as place:
        folder = Path(place)
        os.environ["XDG_CACHE_HOME"] = place
        if text is None:
            text = folder / "manual.txt"
            text.write_text(python_manual(), encoding="utf-8")
        tokens = read_tokens(text, load_tokenizer(ModelConfig(model=str(source), offline=True)), count)
        wide = folder / "float32.gguf"
        in_float32(source, wide)
        for name in names:
            file = folder / f"{name}.gguf"
            quantized(wide, file, name)
            yield Row(
                name, matrices_of(file), file.stat().st_size, their_loss(file, tokens), *our_losses(file, tokens, dtype)
            )
            file.unlink()


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(prog="python -m lab.tools.gguf_types", description=__doc__)
    parser.add_argument("--types", default=",".join(TYPES), help="separated by commas")
    parser.add_argument("--text", type=Path, help="a text file (default: the manual of Python)")
    parser.add_argument("--tokens", type=int, default=2000, help="that are predicted (default: 2000)")
    parser.add_argument("--dtype", default="auto", help="of activations and cache (default: auto)")
    page = Path("lab/docs/performance.md")
    parser.add_argument("--page", type=Path, default=page, help="has the table between its marks")
    options = parser.parse_args()
    lines = ["| type | matrices | MB | llama.cpp | prompts | difference | steps | difference |", "| --- " * 8 + "|"]
    for row in rows(options.types.split(","), options.text, options.tokens, options.dtype):
        print(row, row.note, flush=True)
        lines.append(str(row))
    head, begin, rest = options.page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    options.page.write_text(f"{head}{begin}{chr(10).join(lines)}\n{end}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
