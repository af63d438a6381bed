"""Measures a GPU: each job is a line of the record, and the most telling ones come first."""

from __future__ import annotations

import copy
import gc
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from h2o_lab.gpu.options import GpuOptions
from h2o_lab.random_models.weights import read_settings
from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.describe import weight_bytes
from h2o_stream.base.resources import version_of
from h2o_stream.compare.comparison import Comparison, Job, Notify, cache_settings
from h2o_stream.compare.folder import JobResult
from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.engine.device_logits import TensorLogits
from h2o_stream.engine.sampling import Sampler
from h2o_stream.errors import H2OStreamError, means_out_of_memory

LLAMA_3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip

PROMPTS, LONG = (1024, 4096), 32768
"""Tokens of prompts; the last is read with every window."""

SHAPES = (512, 512), (2048, 2048), (7000, 1024)
"""Prompt and reply of batches, whose cache takes `BUDGET` bytes with windows of a fifth."""

BUDGET = 4 << 30
ROWS, STEPS = 64, 40

FIRST = ("Llama 3", "Qwen 3 MoE", "LFM2", "Gemma 3", "gpt-oss")
"""Families that are compared with the CPU before the others."""


class Gpu(Comparison[GpuOptions]):
    """One model on one GPU."""

    name = "gpu"
    exclusive = True
    device = "cuda"

    def __init__(self, options: GpuOptions) -> None:
        super().__init__(options)
        self._begun, self._notify = time.monotonic(), lambda note: None
        self._model: Any = None
        self._bytes_per_s = 0.0

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Check that there is a GPU. The model is made when a job needs it."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise H2OStreamError("there is no GPU here: torch finds none, so that nothing can be measured")
        self._notify = notify
        settings = self.options.random_weights
        self._config = read_settings(settings) if settings else AutoConfig.for_model("llama", **LLAMA_3_8B)
        return {
            "model": f"{self._config.model_type}, random weights" if settings else "Llama-3-8B's shape, random weights",
            "gpu": torch.cuda.get_device_name() if self.device == "cuda" else self.device,
            "triton": version_of("triton"),
            "stream": self.options.stream,
            "settings": self._config.to_dict(),
            **cache_settings(self.configs),
        }

    def jobs(self) -> list[Job]:
        """Steps, prompts, batches, the stream, and families."""
        small, *others = self.options.windows
        lines: list[tuple[str, Callable[[], dict[str, Any]]]] = [("bandwidth", self._bandwidth)]
        lines += [(f"family {name}", partial(self._family, name)) for name in FIRST[:1]]
        lines += [(f"step, window {window}", partial(self._step, window, 1)) for window in self.options.windows]
        lines += [(f"step of {ROWS} rows", partial(self._step, small, ROWS))]
        lines += [(f"prompt of {count}", partial(self._prompt, small, count)) for count in (*PROMPTS, LONG)]
        lines += [(f"prompt, window {window}", partial(self._prompt, window, LONG)) for window in others]
        lines += [(f"full cache, prompt of {count}", partial(self._full, count)) for count in (*PROMPTS, LONG)]
        lines += [("full cache, compiled", partial(self._compiled, PROMPTS[-1]))]
        if importlib.util.find_spec("flash_attn"):
            lines += [(f"full cache, FlashAttention, prompt of {LONG}", partial(self._full, LONG, "flash_attention_2"))]
        lines += [("stream", self._stream)]
        lines += [(f"batch of {prompt}+{new}", partial(self._batch, prompt, new)) for prompt, new in SHAPES]
        lines += [(f"family {name}", partial(self._family, name)) for name in _families()]
        key = {"what": self.name, "device": self._device_name(), "versions": [*map(version_of, _VERSIONS)],
               "settings": self._config.to_dict(), "stream": self.options.stream}  # fmt: skip
        return [
            Job(label, {**key, "line": label}, 1, partial(self._line, run, "full cache" in label))
            for label, run in dict(lines).items()
        ]

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each line, as long as there is time."""
        jobs = self.jobs()
        for number, (job, result) in enumerate(zip(jobs, results, strict=False), 1):
            yield {"type": self.name, "what": job.label, **result.figures}
            if time.monotonic() > self._begun + 60 * self.options.minutes and number < len(jobs):
                self._notify(f"{len(jobs) - number} of {len(jobs)} lines are left; the same command goes on with them")
                return

    def close(self) -> None:
        """Release the model."""
        self._model = None
        super().close()

    def _device_name(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else self.device

    @torch.no_grad()
    def _line(self, run: Callable[[], dict[str, Any]], of_others: bool) -> Iterator[JobResult]:
        try:
            figures = run()
        except Exception as error:
            if not of_others and not means_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            figures = {"failed": "out of memory" if means_out_of_memory(error) else reason}
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        yield JobResult(figures)

    # what is measured

    def _bandwidth(self) -> dict[str, Any]:
        """Bytes read and written per second by a copy."""
        source = torch.zeros(1 << (30 if self.device == "cuda" else 20), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self._seconds(lambda: target.copy_(source), 3)
        self._bytes_per_s = 2 * len(source) / self._seconds(lambda: target.copy_(source), 20)
        return {"gb_s": round(self._bytes_per_s / 1e9, 1)}

    def _step(self, window: int, rows: int) -> dict[str, Any]:
        with attach(self._made(), self._cache(window)) as cache:
            self._fill(cache, rows, window)
            one = self._ids(rows, 1)
            for _ in range(6):
                self._forward(one, cache)
            took, sampler = self._seconds(lambda: self._forward(one, cache), STEPS), Sampler(SamplingConfig(), None)

            def sample() -> int:
                return sampler.sample(TensorLogits(self._forward(one, cache).logits[0, -1].float()))

            sampled = self._seconds(sample, STEPS)
            floor = (weight_bytes(self._made()) + cache.nbytes) / (self._bytes_per_s or self._measured())
            return {
                "window": window, "rows": rows, "ms": round(1e3 * took, 3), "tok_s": round(rows / took, 1),
                "sampled_ms": round(1e3 * sampled, 3), "of_floor": round(floor / took, 3), "steps": cache.engine_note,
            }  # fmt: skip

    def _prompt(self, window: int, count: int) -> dict[str, Any]:
        ids = self._ids(1, count)
        with attach(self._made(), self._cache(window)) as cache:
            self._forward(ids[:, : min(count, 4 * window)], cache)
            cache.reset()
            took = self._seconds(lambda: self._forward(ids, cache))
            return {"window": window, "rows": 1, "tokens": count, "ms": round(1e3 * took, 1),
                    "tok_s": round(count / took, 1), "steps": cache.engine_note}  # fmt: skip

    def _full(self, count: int, attention: str = "sdpa") -> dict[str, Any]:
        """A prompt and a step of transformers' own cache."""
        model, ids = self._made(), self._ids(1, count)
        before, cache = model.config._attn_implementation, cast(Any, None)

        def read() -> None:
            nonlocal cache
            cache = DynamicCache(config=model.config)
            self._forward(ids, cache)

        model.set_attn_implementation(attention)
        try:
            read()
            took, one = self._seconds(read), self._ids(1, 1)
            step = self._seconds(lambda: self._forward(one, cache), 10)
        finally:
            model.set_attn_implementation(before)
        return {"rows": 1, "tokens": count, "ms": round(1e3 * took, 1), "tok_s": round(count / took, 1),
                "step_ms": round(1e3 * step, 3)}  # fmt: skip

    def _compiled(self, count: int) -> dict[str, Any]:
        """A step of transformers' static cache, which its `generate` compiles on a GPU."""
        ids = self._ids(1, count)

        def seconds(new: int) -> float:
            more: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return self._seconds(lambda: self._made().generate(ids, cache_implementation="static", **more))

        seconds(2 * STEPS)
        step = (seconds(2 * STEPS) - seconds(STEPS)) / STEPS
        return {"rows": 1, "tokens": count, "step_ms": round(1e3 * step, 3), "step_tok_s": round(1 / step, 1)}

    def _stream(self) -> dict[str, Any]:
        """Memory and speed at the beginning and at the end of a long stream."""
        window, half = self.options.windows[0], self.options.stream // 2
        one, part = self._ids(1, 1), self._ids(1, 2 * window)
        with attach(self._made(), self._cache(window)) as cache:
            found = []
            for end in (4 * window, self.options.stream):
                while cache.seen_tokens + part.shape[1] < min(end, half):
                    self._forward(part, cache)
                while cache.seen_tokens + 8192 < end:
                    self._forward(self._ids(1, 8192), cache)
                for _ in range(6):
                    self._forward(one, cache)
                took = self._seconds(lambda: self._forward(one, cache), STEPS)
                found.append((torch.cuda.memory_allocated() if self.device == "cuda" else 0, cache.nbytes, took))
            (before, cache_before, first), (after, cache_after, last) = found
            return {
                "window": window, "tokens": cache.seen_tokens, "ms": round(1e3 * last, 3),
                "tok_s": round(1 / last, 1), "slower": round(last / first, 3), "more_bytes": after - before,
                "more_cache_bytes": cache_after - cache_before,
            }  # fmt: skip

    def _batch(self, prompt: int, new: int) -> dict[str, Any]:
        """Rows whose caches take `BUDGET` bytes, beside as many with a full cache in host memory.

        Replies are not generated: their time is that of steps after the prompt.
        """
        model, window = self._made(), (prompt + new) // 5
        text = model.config.get_text_config()
        size = 4 * text.num_hidden_layers * text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
        rows: int = max(1, min(BUDGET // (window * size), BUDGET // 4 // (prompt * text.hidden_size)))
        ids, one = self._ids(rows, prompt), self._ids(rows, 1)

        def tokens_per_s(cache: Any) -> float:
            reading = self._seconds(lambda: self._forward(ids, cache))
            for _ in range(6):
                self._forward(one, cache)
            step = self._seconds(lambda: self._forward(one, cache), 4)
            return rows * new / (reading + new * step)

        with attach(model, self._cache(window)) as cache:
            ours, note = tokens_per_s(cache), cache.engine_note
        theirs = tokens_per_s(DynamicCache(config=model.config, offloading=self.device == "cuda"))
        return {"window": window, "rows": rows, "tokens": prompt + new, "tok_s": round(ours, 1),
                "offloaded_tok_s": round(theirs, 1), "times": round(ours / theirs, 2), "steps": note}  # fmt: skip

    def _family(self, name: str) -> dict[str, Any]:
        """Largest difference of logits on the GPU and on the CPU, in parts of their rms."""
        model = _families()[name]() if name in _families() else None
        if model is None:
            return {"failed": "only in a checkout"}
        torch.backends.cudnn.allow_tf32 = False
        ids, config = torch.arange(3, 63)[None] % 61 + 3, CacheConfig(window=24, chunk=16, budgets="equal")
        found = []
        for device, engine in (("cpu", "eager"), (self.device, "auto")):
            moved = copy.deepcopy(model).to(device)
            with attach(moved, config, engine=engine) as cache:  # type: ignore[arg-type]
                parts = (ids[:, :40], *ids[:, 40:].split(1, 1))
                found.append(torch.cat([moved(x.to(device), past_key_values=cache).logits.cpu() for x in parts], 1))
                note = cache.engine_note
        error = float((found[0] - found[1]).abs().max() / found[0].square().mean().sqrt())
        return {"error": float(f"{error:.1e}"), "steps": note}

    # what it is measured with

    def _made(self) -> Any:
        """The model, made when it is needed first."""
        if self._model is None:
            dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
            torch.manual_seed(0)
            with torch.device(self.device):
                self._model = AutoModelForCausalLM.from_config(self._config, dtype=dtype).eval()
        return self._model

    def _cache(self, window: int) -> CacheConfig:
        return CacheConfig(self.options.policies[0], window=window, budgets="equal")

    def _fill(self, cache: Any, rows: int, window: int) -> None:
        self._forward(self._ids(rows, window + 256), cache)

    def _forward(self, ids: Tensor, cache: Any) -> Any:
        return self._made()(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _ids(self, rows: int, count: int) -> Tensor:
        vocabulary = self._config.get_text_config().vocab_size
        return torch.randint(3, vocabulary, (rows, count), device=self.device)

    def _seconds(self, run: Callable[[], Any], times: int = 1) -> float:
        """Of one call, in the mean."""
        wait = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(times):
            run()
        wait()
        return (time.perf_counter() - start) / times

    def _measured(self) -> float:
        self._bandwidth()
        return self._bytes_per_s


_VERSIONS = ("h2o-stream", "torch", "transformers", "triton")
"""Packages on whose versions a line depends."""


def _families() -> dict[str, Callable[[], Any]]:
    """The models of the tests by name, in a checkout."""
    if importlib.util.find_spec("tests") is None or importlib.util.find_spec("tests.families") is None:
        return {}
    from tests.families import FAMILIES

    made = {family.name: family.make for family in FAMILIES}
    return {name: made[name] for name in (*FIRST, *made) if name in made}
