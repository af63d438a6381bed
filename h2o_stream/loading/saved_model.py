"""What is done while transformers reads the weights of a model, and after it has packed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers.utils.logging import set_tqdm_hook

from h2o_stream.base.progress import Progress, ProgressCallback
from h2o_stream.models.packed_cache import MIN_BYTES
from h2o_stream.native.abi import MatrixKind
from h2o_stream.runtime.packed_file import Entry, write_packed


@contextmanager
def report_progress(what: str, skeleton: Any, progress: ProgressCallback) -> Iterator[None]:
    """Report the progress of transformers reading the weights of `skeleton`."""
    width = (getattr(skeleton.config, "dtype", None) or torch.float32).itemsize
    sizes = {name: tensor.numel() * width for name, tensor in skeleton.state_dict().items()}
    total = sum(sizes.values())

    def hook(factory: Any, args: Any, kwargs: Any) -> Any:
        if not args or not hasattr(args[0], "__len__"):
            return factory(*args, **kwargs)
        return counted(args[0])

    def counted(items: Any) -> Iterator[Any]:
        done = 0
        for item in items:
            progress(Progress(what, min(done, total), total))
            yield item
            done += sizes.get(item[0], 0)
        progress(Progress(what, total, total))

    previous = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def save_packed(model: Any, folder: Path, metadata: Mapping[str, str], notify: Callable[[str], None]) -> None:
    """Keep the weights of a packed model for later starts, unless it is small."""
    modules = model.config.quantization_config.modules

    def entry(name: str, tensor: torch.Tensor) -> Entry:
        module, _, last = name.rpartition(".")
        kind = MatrixKind[modules[module]] if last == "tiles" else None
        numbers = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        dtype = _SAVED_DTYPES[tensor.dtype]
        return Entry(name, dtype, tuple(tensor.shape), tensor.nbytes, lambda out: numpy.copyto(out, numbers), kind)

    entries = [entry(name, tensor.detach()) for name, tensor in model.state_dict().items()]
    if sum(each.nbytes for each in entries) >= MIN_BYTES:
        write_packed(entries, metadata, folder, notify)


_SAVED_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""safetensors' names of dtypes."""
