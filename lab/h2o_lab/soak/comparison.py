"""A soak test: memory, speed, loss and the cache's invariants over a very long stream."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.nn.functional import cross_entropy

from h2o_lab.report.everything import manual_file
from h2o_lab.soak.options import SoakOptions
from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import input_device
from h2o_stream.base.memory import trim_heap
from h2o_stream.base.resources import cache_folder, write_atomically
from h2o_stream.base.texts import read_text
from h2o_stream.cache.audit import audit
from h2o_stream.cache.identity import model_digest
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, cache_settings
from h2o_stream.compare.folder import JobResult, machine
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.config import PREFILL_STEP
from h2o_stream.errors import DataError, file_errors
from h2o_stream.native.pointers import dtype_name

TINY = "tiny"
"""Name of a random Llama with two layers, for streams of millions of tokens."""

_READ, _REPLY = 512, 64
"""Tokens of a turn: text, and a sampled reply."""

_STRETCHES = 20
"""Records of a stream, which is divided evenly."""


class Soak(Comparison[SoakOptions]):
    """One stream of turns: a text again and again, and a reply after each piece of it.

    The state of the stream is kept in the folder of --out, so that an interrupted one goes on.
    """

    name = "soak"
    exclusive = True

    def __init__(self, options: SoakOptions) -> None:
        super().__init__(options)
        self._config, self._text = self.configs[0], options.text or manual_file(options.out or cache_folder())
        self._state = options.out and options.out / "state.safetensors"
        self._tokens: list[int] = []
        self._cache: Any = None
        self._stack = ExitStack()
        self._generator = torch.Generator()

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model, and cut the text to the length of a pass."""
        if self.options.model.model == TINY:
            self.model = tiny()
            tokens = list(read_text(self._text, f"--text {self._text}").encode())
        else:
            self.load_model(notify)
            tokens = read_tokens(self._text, self.tokenizer, self.options.tokens)
        self._turns_of_pass = math.ceil(self.options.tokens / (_READ + _REPLY) / self.options.passes)
        needed = self._turns_of_pass * _READ
        if len(tokens) < needed:
            raise DataError(f"--text {self._text}: {len(tokens)} tokens, {needed} are needed; raise --passes")
        self._tokens = tokens[:needed]
        return {
            "model": self.options.model.model,
            "identity": model_digest(self.model),
            "machine": machine(),
            "dtype": dtype_name(self.model.dtype),
            "text": str(self._text),
            "digest": digest_of(self._tokens),
            "tokens": self.options.tokens,
            "passes": self.options.passes,
            "steps": self.options.engine,
            **cache_settings(self.configs),
        }

    def jobs(self) -> list[Job]:
        """One for each stretch of the stream; each continues the one before."""
        turns = self._turns_of_pass * self.options.passes
        edges = [turns * number // _STRETCHES for number in range(_STRETCHES + 1)]
        return [self._job(number, range(*edge)) for number, edge in enumerate(pairwise(edges))]

    def _job(self, number: int, turns: range) -> Job:
        key = self.key(
            self._config,
            tokens=digest_of(self._tokens),
            turns=[turns.start, turns.stop],
            passes=self.options.passes,
            steps=self.options.engine,
            machine=machine(),
        )
        return Job("turns", key, len(turns), partial(self._stretch, number, turns))

    @torch.no_grad()
    def _stretch(self, number: int, turns: range) -> Iterator[JobProgress | JobResult]:
        self._resume(number)
        cache, seconds = self._cache, {"read": 0.0, "reply": 0.0}
        losses: list[tuple[int, float]] = []
        largest = 0.0
        for turn in turns:
            offset = turn % self._turns_of_pass * _READ
            start = time.perf_counter()
            loss, logits = self._read(self._tokens[offset : offset + _READ])
            middle = time.perf_counter()
            self._reply(logits)
            seconds["read"] += middle - start
            seconds["reply"] += time.perf_counter() - middle
            losses.append((turn // self._turns_of_pass, loss))
            largest = max(largest, audit(cache.evicting_groups))
            yield JobProgress(turn - turns.start + 1)
        self._save(number)
        yield JobResult(
            {
                "seen": cache.seen_tokens,
                "turns": len(turns),
                "read_tok_s": _READ * len(turns) / seconds["read"],
                "reply_tok_s": _REPLY * len(turns) / seconds["reply"],
                "losses": losses,
                "largest_score": largest,
                "cache_bytes": cache.nbytes,
                "rss_bytes": psutil.Process().memory_info().rss,
                "steps": cache.engine_note,
            }
        )

    def _read(self, tokens: Sequence[int]) -> tuple[float, torch.Tensor]:
        """Feed a piece of text. Returns the mean loss of its tokens but the first, and the logits after the last."""
        ids, losses = torch.tensor([list(tokens)], device=input_device(self.model)), []
        for start in range(0, len(tokens), PREFILL_STEP):
            chunk = ids[:, start : start + PREFILL_STEP]
            logits = self.model(chunk, past_key_values=self._cache, use_cache=True).logits[0].float()
            expected = ids[0, start + 1 : start + 1 + chunk.shape[1]]
            losses.append(cross_entropy(logits[: len(expected)], expected, reduction="none"))
        trim_heap()
        return float(torch.cat(losses).mean()), logits[-1]

    def _reply(self, logits: torch.Tensor) -> None:
        for _ in range(_REPLY):
            token = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=self._generator)
            fed = token.view(1, 1).to(input_device(self.model))
            logits = self.model(fed, past_key_values=self._cache, use_cache=True).logits[0, -1].float()

    def _resume(self, number: int) -> None:
        """Restore the stream as it was before a stretch."""
        if self._cache is not None:
            return
        self._cache = self._stack.enter_context(attach(self.model, self._config, engine=self.options.engine))
        self._generator.manual_seed(0)
        if number == 0:
            return
        try:
            assert self._state is not None
            state = load_file(self._state)
            if int(state.pop("stretch")) != number - 1:
                raise ValueError("it is of another stretch")
            self._generator.set_state(state.pop("drawn"))
        except (OSError, SafetensorError, KeyError, ValueError, AssertionError) as error:
            raise DataError(f"--out {self._state}: {error}; begin again in another folder") from error
        self._cache.load_state_dict(state)

    def _save(self, number: int) -> None:
        if self._state is not None:
            state = self._cache.state_dict()
            state |= {"stretch": torch.tensor(number), "drawn": self._generator.get_state()}
            with file_errors(f"--out {self._state.parent}"):
                write_atomically(self._state, save(state))

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each stretch."""
        for result in results:
            losses = result.figures["losses"]
            yield {
                "type": self.name,
                **{name: value for name, value in result.figures.items() if name != "losses"},
                "nll": fmean(loss for _, loss in losses),
                "nll_by_pass": {
                    str(number): [loss for of_pass, loss in losses if of_pass == number]
                    for number in dict.fromkeys(of_pass for of_pass, _ in losses)
                },
            }

    def close(self) -> None:
        """Detach the model."""
        self._stack.close()


def tiny() -> Any:
    """A random Llama of two layers whose tokens are bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            initializer_range=0.3,
        )
    ).eval()
