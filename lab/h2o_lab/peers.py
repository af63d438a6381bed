"""Engines outside of torch that are timed beside ours, with the GGUF file of the model."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.compare.speed.engines import EngineInfo, EngineSpec, Runner
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.find import gguf_file
from h2o_stream.models.gguf import GgufFile
from h2o_stream.runtime.families.architecture import EMBEDDING, LAYER_EMBEDDINGS, OUTPUT

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

_OPENVINO_BLOCK = 32
"""Slots that OpenVINO evicts at a time."""


class _FileRunner(Runner):
    """An engine that reads the GGUF file of the model."""

    _info: EngineInfo

    def info(self) -> EngineInfo:
        return self._info

    def cache_bytes(self) -> None:
        return None

    def next_logits(self, token: int) -> NDArray[numpy.float32]:
        """Decode a token. Returns the logits [V] after it."""
        raise NotImplementedError

    def _file(self) -> Path:
        path = gguf_file(self.spec.model.model)
        assert path is not None, "the options were checked"
        return path

    def _describe(self, path: Path, context: int | None) -> None:
        self._info = EngineInfo("as in the file", step_bytes(GgufFile(path)), context)


def step_bytes(file: GgufFile) -> int:
    """Bytes of a file's weights that a step reads, see `h2o_stream.attachment.describe.weight_bytes`."""
    chosen, count = (file.metadata.get(f"{file.architecture}.expert_{name}count", 1) for name in ("used_", ""))
    untied = [EMBEDDING] if f"{OUTPUT}.weight" in file.tensors else []
    tables = [f"{name}.weight" for name in (*untied, LAYER_EMBEDDINGS)]
    total = 0
    for tensor in file.tensors.values():
        if tensor.name in tables:
            total += tensor.nbytes // tensor.shape[0]
        else:
            total += tensor.nbytes * chosen // count if "_exps." in tensor.name else tensor.nbytes
    return total


class LlamaCppRunner(_FileRunner):
    """llama.cpp through llama-cpp-python, with the GGUF file of the model."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        import llama_cpp

        path = self._file()
        threads = spec.threads or os.cpu_count()
        try:
            self._llama = llama_cpp.Llama(
                str(path), n_ctx=spec.length, n_threads=threads, n_threads_batch=threads, verbose=False
            )
        except ValueError as error:
            raise H2OStreamError(f"llama.cpp cannot load {path}: {error}") from error
        self._describe(path, llama_cpp.llama_model_n_ctx_train(self._llama.model))
        self._logits = llama_cpp.llama_get_logits

    def step(self, tokens: Sequence[int]) -> None:
        """See `Runner`."""
        self._llama.eval(list(tokens))

    def next_logits(self, token: int) -> NDArray[numpy.float32]:
        """Decode a token. Returns the logits [V] after it."""
        self.step([token])
        return numpy.ctypeslib.as_array(self._logits(self._llama.ctx), (self._llama.n_vocab(),))


class IkLlamaCppRunner(_FileRunner):
    """ik_llama.cpp through ik-llama-cpp-python, which itself only generates: tokens are fed by its inner parts."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api, _internals

        path = self._file()
        self._log = _LOG(lambda *message: None)  # which it does in spite of verbose=False
        _ctypes_api._lib.llama_log_set(self._log, None)
        try:
            self._llama = ik_llama_cpp.IkLlama(
                str(path), n_ctx=spec.length, n_threads=spec.threads or os.cpu_count() or 1, verbose=False
            )
        except RuntimeError as error:
            raise H2OStreamError(f"ik_llama.cpp cannot load {path}: {error}") from error
        self._api, self._make_batch, self._fed = _ctypes_api, _internals.make_batch_range, 0
        self._describe(path, None)

    def step(self, tokens: Sequence[int]) -> None:
        """See `Runner`."""
        context = self._llama._context
        for begin in range(0, len(tokens), context._n_ubatch):
            chunk = list(tokens[begin : begin + context._n_ubatch])
            batch = self._make_batch(chunk, pos_start=self._fed, logits_last=True)
            failed = context.decode(batch)
            self._api.llama_batch_free(batch)
            if failed:
                raise H2OStreamError(f"ik_llama.cpp cannot read token {self._fed}: {failed}")
            self._fed += len(chunk)

    def next_logits(self, token: int) -> NDArray[numpy.float32]:
        """Decode a token. Returns the logits [V] after it."""
        self.step([token])
        context = self._llama._context
        logits = ctypes.cast(context.get_logits(), ctypes.POINTER(ctypes.c_float))
        return numpy.ctypeslib.as_array(logits, (context.model.n_vocab,))


class OpenVinoRunner(_FileRunner):
    """OpenVINO GenAI, which converts the file itself.

    It generates only tokens of its own, so `decode` times as many of those. A prompt is read anew with each call, but
    for the beginning that is still in its cache; what it evicts, it has to read again.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        import openvino
        import openvino_genai

        path = self._file()
        self._openvino, self._genai, self._tokens = openvino, openvino_genai, list[int]()
        self._evicts = spec.cache.policy != "full"
        threads = {"INFERENCE_NUM_THREADS": spec.threads} if spec.threads else {}
        try:
            self._pipeline = openvino_genai.LLMPipeline(str(path), "CPU", scheduler_config=self._scheduler(), **threads)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise H2OStreamError(f"OpenVINO cannot load {path}: {reason}") from error
        self._describe(path, None)

    def _scheduler(self) -> Any:
        genai = self._genai
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = not self._evicts
        if self._evicts:
            window = max(self.spec.cache.window // _OPENVINO_BLOCK, 3) * _OPENVINO_BLOCK
            recent = window // 2 // _OPENVINO_BLOCK * _OPENVINO_BLOCK
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                start_size=_OPENVINO_BLOCK,
                recent_size=recent,
                max_cache_size=window,
                aggregation_mode=genai.AggregationMode.NORM_SUM,
            )
        return scheduler

    def prepare(self) -> None:
        """Run a short stream: the first one compiles."""
        self.feed([5] * 64)
        self.decode([5, 6])
        self._tokens.clear()

    def step(self, tokens: Sequence[int]) -> None:
        """See `Runner`."""
        self._tokens += tokens

    def feed(self, tokens: Sequence[int]) -> float:
        """See `Runner`."""
        self.step(tokens)
        seconds: float = self._generate(1).get_ttft().mean / 1000
        return seconds * len(tokens) / len(self._tokens) if self._evicts else seconds

    def decode(self, tokens: Sequence[int]) -> float:
        """See `Runner`."""
        seconds: float = self._generate(len(tokens) + 1).get_tpot().mean / 1000 * len(tokens)
        self.step(tokens)
        return seconds

    def _generate(self, count: int) -> Any:
        """Read the tokens so far and generate `count` more, which it does not remember. Returns how long it took."""
        import numpy

        ids = numpy.array([self._tokens], dtype=numpy.int64)
        tensors = [self._openvino.Tensor(array) for array in (ids, numpy.ones_like(ids))]
        config = self._genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        return self._pipeline.generate(self._genai.TokenizedInputs(*tensors), config).perf_metrics
