"""Replies that repeat what was said, and prose, with guesses and without; llama.cpp with its own lookup beside them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import median
from typing import Any, NamedTuple

from h2o_lab.speculation.options import SpeculationOptions
from h2o_stream.base.resources import python_manual, version_of
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, window_of
from h2o_stream.compare.folder import JobResult, machine
from h2o_stream.compare.speed.engines import LLAMA_CPP, OURS
from h2o_stream.config import RecallConfig, SamplingConfig, SpeculateMode
from h2o_stream.engine.engine import Engine
from h2o_stream.models.find import gguf_file
from h2o_stream.native.threads import bandwidth
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.turn import Turn

_ROUNDS, _TOKENS = 3, 192
MODES: tuple[SpeculateMode, ...] = "off", "auto"
"""Without guesses, and with them."""

_MANUAL = 12000  # characters between a passage and the question about it

_KEEPER = (
    "Elias Thorne kept the lighthouse of Skerry Point for thirty-one years. He oiled the brass on Mondays, trimmed the "
    "lamp at dusk, and wrote the height of the tide into a blue ledger. In the winter of 1912 he carried two sailors "
    "up ninety-four steps, one on each shoulder, and told nobody about it until they came back with a silver whistle."
)
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "delivery_address": {"type": "string"},
        "number_of_items": {"type": "integer"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"description": {"type": "string"}, "quantity": {"type": "integer"}},
                "required": ["description", "quantity"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "delivery_address", "number_of_items", "items"],
    "additionalProperties": False,
}
"""The schema of an order."""


@dataclass(frozen=True)
class _Task:
    """What is asked last; earlier turns, whose missing replies the model gives; what the reply has to be."""

    question: str
    earlier: Mapping[str, str | None] = field(default_factory=dict)
    schema: Mapping[str, Any] | None = None
    recall: bool = False


def _tasks() -> dict[str, _Task]:
    """By name, see `SpeculationOptions.tasks`."""
    return {
        "edit": _Task(
            "Show the whole class again with two more methods: size and clear.",
            {"Write a Python class Stack with push, pop and peek, with a docstring for each method.": None},
        ),
        "recall": _Task(
            "What did I tell you about Elias Thorne, the keeper of the lighthouse of Skerry Point?",
            {_KEEPER: "Noted.", python_manual()[:_MANUAL]: "Noted."},
            recall=True,
        ),
        "json": _Task(
            "Ann Example, 12 Mill Lane, Springfield, orders 3 copper kettles, 12 pewter spoons, 2 oak tables and 6 "
            "linen napkins. Give her order as JSON.",
            schema=ORDER,
        ),
        "prose": _Task("Write a story about a lighthouse keeper who finds a letter in a bottle."),
    }


class _Round(NamedTuple):
    """Figures of a reply, its text, and a digest of what the cache holds after it."""

    tok_s: float
    tokens_per_pass: float = 0.0
    text: str = ""
    state: str = ""


class Speculation(Comparison[SpeculationOptions]):
    """How fast replies of some kinds are."""

    name = "speculation"
    exclusive = native = True

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model."""
        self._config = next((config for config in self.configs if config.policy == "h2o"), self.configs[0])
        return {**self.load_model(notify), "seed": 0, "tasks": [*self.options.tasks], "machine": machine()}

    def jobs(self) -> list[Job]:
        """One for each task."""
        peer = LLAMA_CPP in self.options.peers
        key = {"machine": machine(), "version": version_of("h2o-stream"), "peer": peer}
        rounds = _ROUNDS * (len(MODES) + 2 * peer)
        return [
            Job(task, self.key(self._config, task=task, **key), rounds, lambda task=task: self._race(task), task)
            for task in self.options.tasks
        ]

    def _race(self, name: str) -> Iterator[JobProgress | JobResult]:
        task, found = _tasks()[name], dict[tuple[str, SpeculateMode], list[_Round]]()
        done, talk = 0, list[dict[str, str]]()
        for _ in range(_ROUNDS):
            for mode in MODES:
                yield JobProgress(done, f"{name}, guesses {mode}")
                turn, talk, state = self._reply(task, mode)
                figures = turn.timings.decode_tok_s, turn.timings.tokens_per_pass
                found.setdefault((OURS, mode), []).append(_Round(*figures, turn.text, state))
                done += 1
        for mode in MODES if LLAMA_CPP in self.options.peers else ():
            llama = _llama(str(gguf_file(self.options.model.model)), self.options.threads, mode)
            for _ in range(_ROUNDS):
                yield JobProgress(done, f"{name}, {LLAMA_CPP} {mode}")
                found.setdefault((LLAMA_CPP, mode), []).append(_Round(_llama_speed(llama, task, talk)))
                done += 1
        yield JobResult({"records": [self._record(name, *key, rounds) for key, rounds in found.items()]})

    def _reply(self, task: _Task, mode: SpeculateMode) -> tuple[Turn, list[dict[str, str]], str]:
        """The last turn with guesses or without, the messages before its reply, and a digest of the state after it."""
        with self.engine_for(self._config, SamplingConfig(0.0, max_tokens=_TOKENS)) as engine:
            engine.speculation.mode = mode
            recall = RecallConfig("auto" if task.recall else "off")
            conversation, talk = Conversation(engine, None, (), recall), list[dict[str, str]]()

            def say(text: str) -> Turn:
                return next(event for event in conversation.say(text) if isinstance(event, Turn))

            for text, reply in task.earlier.items():
                if reply is None:
                    reply = say(text).text
                else:
                    list(conversation.feed_turn(text, reply))
                talk += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
            conversation.follow(task.schema)
            turn = say(task.question)
            return turn, [*talk, {"role": "user", "content": task.question}], digest_of(engine)

    def _record(self, task: str, engine: str, mode: SpeculateMode, rounds: list[_Round]) -> dict[str, Any]:
        speed = median(reply.tok_s for reply in rounds)
        ours = engine == OURS and isinstance(self.model, RuntimeModel)
        floor = bandwidth(self.options.threads) / self.model.description.nbytes if ours else 0.0
        return {
            "type": self.name,
            "task": task,
            "engine": engine,
            "speculate": mode,
            "policy": self._config.policy if ours else "full",
            "window": window_of(self._config) if ours else None,
            "decode_tok_s": round(speed, 2),
            "tokens_per_pass": round(median(reply.tokens_per_pass for reply in rounds), 2) or None,
            "of_floor": round(speed / floor, 3) if floor else None,
            "text": rounds[-1].text or None,
            "state": rounds[-1].state or None,
        }

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each task, engine and mode."""
        for result in results:
            yield from result.figures["records"]


def digest_of(engine: Engine) -> str:
    """A digest of what the cache holds."""
    state = sha256()
    for key, array in sorted(engine.served.state_dict().items()):
        state.update(key.encode() + array.tobytes())
    return state.hexdigest()


def _llama(path: str, threads: int | None, mode: SpeculateMode) -> Any:
    """llama.cpp, with lookup decoding of its binding or without."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding() if mode == "auto" else None
    return Llama(path, n_ctx=8192, n_threads=threads, n_threads_batch=threads, draft_model=draft, verbose=False)


def _llama_speed(llama: Any, task: _Task, talk: list[dict[str, str]]) -> float:
    """Tokens of a reply per second, from the second one on."""
    shape = {"type": "json_object", "schema": task.schema} if task.schema else None
    pieces = llama.create_chat_completion(
        talk, temperature=0.0, max_tokens=_TOKENS, stream=True, response_format=shape, repeat_penalty=1.0
    )
    began, text = 0.0, ""
    for piece in pieces:
        text += piece["choices"][0]["delta"].get("content") or ""
        began = began or (time.perf_counter() if text else 0.0)
    seconds = time.perf_counter() - began
    return float((len(llama.tokenize(text.encode(), add_bos=False)) - 1) / seconds)
