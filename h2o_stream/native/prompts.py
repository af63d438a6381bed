"""Prompts in the native library, in place of a model's forward: all of it but the attention, which is the cache's."""

from __future__ import annotations

import ctypes
from ctypes import CDLL

import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.native.abi import MatrixKind, pointer
from h2o_stream.native.description import NativeModel

_DENSE = {MatrixKind.FLOAT32, MatrixKind.BFLOAT16}


class PromptForward:
    """The forward of several tokens of each row through one model and one cache.

    Args:
        native: the library.
        model: the description, as structures.
        cache: of the attached model.

    Attributes:
        why_not: why the library does not take prompts of this model, or nothing.
    """

    def __init__(self, native: CDLL, model: NativeModel, cache: H2OCache) -> None:
        self._native, self._model, self._cache = native, model, cache
        dense = any(matrix.kind in _DENSE for matrix in model.description.matrices)
        self.why_not = "its weights are not packed" if dense else ""
        self._prompt = native.h2o_prompt_open(ctypes.addressof(model.struct))

    def __del__(self) -> None:
        if getattr(self, "_prompt", None):
            self._native.h2o_prompt_close(self._prompt)

    def run(self, tokens: Tensor, keep: int) -> Tensor:
        """Take tokens through the model, and count them.

        Args:
            tokens: [B, Q] int64, ids of the vocabulary, none of them padding.
            keep: logits of how many of each row's last tokens are wanted.

        Returns:
            [B, keep, V] float32.

        Raises:
            OutOfMemoryError: there is none for so many tokens.
        """
        (rows, new), cache = tokens.shape, self._cache
        count = rows * new
        seen = torch.tensor(cache.tokens.lengths or (0,) * rows, dtype=torch.int32, device="cpu")
        indices = (seen[:, None] + torch.arange(new, dtype=torch.int32, device="cpu")).contiguous()
        ids = tokens.contiguous()
        cache.begin_token()
        self._call(
            "begin",
            pointer(ids, torch.int64, count),
            pointer(indices, torch.int32, count),
            count,
            torch.get_num_threads(),
        )
        for number in range(len(self._model.layers)):
            self._layer(number, rows, new)
        vocabulary = self._model.struct.vocab_size
        chosen = torch.arange(count, device="cpu").view(rows, new)[:, new - keep :].contiguous()
        logits = torch.empty(rows, keep, vocabulary, dtype=torch.float32, device="cpu")
        self._call(
            "output",
            pointer(chosen, torch.int64, rows * keep),
            rows * keep,
            pointer(logits, torch.float32, rows * keep * vocabulary),
        )
        cache.count_forward()
        return logits

    def _layer(self, number: int, rows: int, new: int) -> None:
        """Take the residual stream through a layer."""
        shape = self._model.layers[number].attention
        keys = (shape.kv_heads, shape.head_size), (shape.kv_heads, shape.value_size)
        sizes = (shape.query_heads, shape.head_size), *keys
        projected = [torch.empty(rows, new, *size, dtype=torch.float32, device="cpu") for size in sizes]
        self._call("project", number, *(pointer(x, torch.float32, x.numel()) for x in projected))
        dtype = self._model.description.dtype
        query, key, value = (x.transpose(1, 2).to(dtype) for x in projected)
        transform = LogitTransform(shape.scaling, shape.softcap or None)
        layer = self._cache.layers[number]
        attended = layer.attend(query, key, value, transform, kernels=self._cache.kernels).float().contiguous()
        size = rows * new * shape.query_heads * shape.value_size
        self._call("finish", number, pointer(attended, torch.float32, size))

    def _call(self, function: str, *arguments: int) -> None:
        if getattr(self._native, f"h2o_prompt_{function}")(self._prompt, *arguments):
            raise OutOfMemoryError("out of memory for so many tokens at once; lower --chunk")
