"""Reports the progress of transformers reading the weights of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils.logging import set_tqdm_hook

from h2o_stream.base.progress import Progress, ProgressCallback


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
            done += sizes.get(item[0].replace(".blocks", ".weight"), 0)
        progress(Progress(what, total, total))

    previous = set_tqdm_hook(hook)
    try:
        yield
    finally:
        set_tqdm_hook(previous)
