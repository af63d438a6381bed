"""What the endpoints of a server use: one model, its worker, and limits. Between asyncio and the worker's thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial

from h2o_stream.base.progress import ignore
from h2o_stream.base.resources import private_data_folder
from h2o_stream.config import EFFORT_VARIABLE, CacheConfig, ModelConfig, ServeConfig
from h2o_stream.engine.grammar import Grammar
from h2o_stream.errors import ConfigError, DataError, H2OStreamError
from h2o_stream.loading.loading import load_model
from h2o_stream.models.loaded import LoadedModel, short_name
from h2o_stream.serve.access import Access
from h2o_stream.serve.aside import LONG, aside
from h2o_stream.serve.conversations import Conversations
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.grammars import Grammars
from h2o_stream.serve.logprobs import TokenTexts
from h2o_stream.serve.messages import Dialogue, chain, first_hash
from h2o_stream.serve.metrics import Metrics
from h2o_stream.serve.replies import Ask, Done, Failed, Message
from h2o_stream.serve.requests import Model, Options, Sampled
from h2o_stream.serve.schemas import size_of
from h2o_stream.serve.store import Store
from h2o_stream.serve.wording import as_api_error
from h2o_stream.serve.worker import Worker
from h2o_stream.session.calls import CallFormat, find_format
from h2o_stream.session.control_tokens import aliased

_log = logging.getLogger(__name__)

_DAY_S = 86_400.0

_RETRY_S = 2
"""Seconds after which a refused client should ask again."""


def load_served(config: ModelConfig, cache: CacheConfig) -> LoadedModel:
    """Load a model that serves several streams: one of the runtime, or one with fused steps on a GPU.

    Raises:
        ConfigError: it does not.
    """
    loaded = load_model(config, cache, "auto", _log.info, ignore)
    if not (reason := loaded.why_transformers):
        return loaded
    from h2o_stream.engine.gpu_model import GpuModel, is_on_gpu

    if not is_on_gpu(loaded.model):
        raise ConfigError(f"h2o-serve serves what runs without torch, which {config.model} does not: {reason}")
    try:
        return replace(loaded, model=GpuModel(loaded.model, cache, ignore), why_transformers="")
    except H2OStreamError as error:
        raise ConfigError(f"h2o-serve cannot serve {config.model} on a GPU: {error}; use --device cpu") from error


def _with_window(model: LoadedModel, cache: CacheConfig, streams: int) -> CacheConfig:
    """The same with the window that ``auto`` chooses for so many streams: all conversations have the same."""
    if not cache.auto_window:
        return cache
    plan = model.model.serve(replace(cache, auto_window=streams)).cache.plan
    return replace(cache, auto_window=streams, window=plan.window)


class Service:
    """A model that is served.

    Args:
        model: its model is one of `ManyStreams`.
        config: limits.
        options: options of conversations whose requests say nothing else.

    Attributes:
        started: seconds since 1970.
        body_bytes: of the requests that arrive, wait or are answered at once.

    Raises:
        DataError: see `Store`.
    """

    def __init__(self, model: LoadedModel, config: ServeConfig, options: Options) -> None:
        has_efforts = EFFORT_VARIABLE in str(model.tokenizer.chat_template)
        options = replace(options, cache=_with_window(model, options.cache, config.awake), has_efforts=has_efforts)
        self.model, self.config, self.options, self.started = model, config, options, int(time.time())
        try:
            folder = config.folder or private_data_folder("served")
        except OSError as error:
            raise DataError(f"conversations cannot be kept: {error}; give a --folder for them") from error
        self.store = Store(folder, model.model.digest, config.states, config.disk, config.expiry_days * _DAY_S)
        self.metrics, self.access = Metrics(), Access(config)
        self.conversations = Conversations(model, config, self.store)
        self.worker = Worker(model, self.conversations, config.running, config.timeout_s, self.metrics)
        ends = self.conversations.templates.end_tokens
        self.grammars = Grammars(model.tokenizer, ends, self.vocabulary, config.running)
        self.active = self.body_bytes = 0

    def start(self) -> None:
        """Begin to serve."""
        if self.options.recall != "off":
            self.worker.call(self.conversations.prepare_recall)
        for make in (lambda: self._token_length, partial(aliased, self.model.tokenizer)):
            self.worker.call(make)  # before somebody waits for it
        self.worker.start()

    @cached_property
    def name(self) -> str:
        """Name of the model for clients, see `short_name`."""
        return short_name(self.model.name)

    @cached_property
    def texts(self) -> TokenTexts:
        """What tokens stand for."""
        return TokenTexts(self.model.tokenizer)

    @property
    def vocabulary(self) -> int:
        """Number of logits."""
        return int(self.model.model.description.output.rows)

    @property
    def limits(self) -> Model:
        """What requests are checked against."""
        return Model(self.model.tokenizer, self.vocabulary, self.config.max_reply)

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of tools; None if it calls none."""
        return find_format(self.model.tokenizer)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the added tokens by their texts: special ones, and others that are one token wherever they are."""
        added = self.model.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    async def _grammar(self, sampled: Sampled, options: Options, raw: bool) -> Grammar | None:
        """What a reply must follow after its thinking: a JSON schema or the form of calls; None if it is free.

        Raises:
            ApiError: it is not supported, or takes too long, or too many are compiled.
        """
        rules = sampled.schema if sampled.rules is None else sampled.rules
        place = sampled.place if sampled.rules is None else "tools"
        if rules is None:
            return None
        try:
            markers = None if raw else self.conversations.templates.make(options, None).free_thinking
            return await self.grammars.make(rules, markers)
        except H2OStreamError as error:
            raise as_api_error(error, place) from error

    @cached_property
    def _token_length(self) -> int:
        """Most characters that a token stands for."""
        return max(map(len, self.model.tokenizer.backend_tokenizer.get_vocab()))

    def _check_room(self, dialogue: Dialogue, options: Options, after: str | None, begins: str) -> None:
        """Refuse what cannot fit into the window, however it grows, or the positions, by its characters: without making
        tokens of it, unless it `begins` with many, with this hash; they are used where it is read.

        Raises:
            ApiError: something is too long.
        """
        plan, sizes = options.cache.plan(), {"pins": sum(map(len, options.pins))}
        context = self.model.model.context
        largest = max(plan.window, context or 0)
        if after is None:
            sizes["messages"] = len(dialogue.system or "")
        for name, size in sizes.items():
            if size > largest * self._token_length:
                message = f"{size} characters are to be kept, at least {size // self._token_length} tokens; a window of"
                raise ApiError(400, f"{message} {largest} holds fewer", name, "context_length_exceeded")
        if plan.positions == "absolute" and context and dialogue.size > context * self._token_length:
            message = f"{dialogue.size} characters are more than the model's {context} positions"
            raise ApiError(400, message, "messages", "context_length_exceeded")
        if begins and context and size_of([dialogue.system, *options.tools], LONG) >= LONG:
            size = self.conversations.templates.get(begins, options, dialogue.system).opening_size
            if size > largest:
                message = f"{size} tokens are to be kept, more than the model's {context} positions"
                raise ApiError(400, message, "messages", "context_length_exceeded")

    @asynccontextmanager
    async def replies(
        self, dialogues: Sequence[Dialogue], options: Options, sampled: Sampled, after: str | None = None,
        keep: bool = True, raw: bool = False, response: str = "",
    ) -> AsyncIterator[Sequence[asyncio.Queue[Message]]]:  # fmt: skip
        """Ask for replies; a queue for each choice, of which only the first is kept, for one dialogue after another.
        Leaving the block ends them.

        Raises:
            ApiError: too many are asked for, by this request or already.
        """
        count, places = len(dialogues) * sampled.choices, self.config.running + self.config.waiting
        if count > places:
            raise ApiError(400, f"{count} replies are asked for at once, --running and --waiting allow {places}", "n")
        if self.active + count > places:
            raise ApiError(429, "too many requests wait already", code="queue_full", retry_after_s=_RETRY_S)
        queues: list[asyncio.Queue[Message]] = [asyncio.Queue() for _ in range(count)]
        asks, asked, grammar = list[Ask](), time.monotonic(), None
        self.active += len(queues)
        try:
            grammar = await self._grammar(sampled, options, raw)
            for dialogue in dialogues:
                size = dialogue.size + size_of(options.tools)
                first = first_hash(options.key, dialogue.system)
                hashes = await aside(size, partial(chain, first, dialogue.past))
                begins = not raw and after is None and next(self.store.last_known(hashes), None) is None
                await aside(size, partial(self._check_room, dialogue, options, after, hashes[0] if begins else ""))
                make = partial(
                    Ask, dialogue, hashes, options, logprobs=sampled.logprobs, slots=sampled.slots, grammar=grammar,
                    after=after, calls=sampled.calls, raw=raw, response=response, asked=asked,
                    pieces=sampled.stream or sampled.logprobs is not None,
                )  # fmt: skip
                for number in range(sampled.choices):
                    config, send = sampled.config.of_choice(number), _sender(queues[len(asks)])
                    asks.append(make(config=config, send=send, keep=keep and not (raw or number)))
            for ask in sorted(asks, key=lambda ask: ask.keep):  # branches are opened before the conversation goes on
                self.worker.submit(ask)
            yield queues
        finally:
            for ask in asks:
                self.worker.cancel(ask)
            self.active -= len(queues)
            if grammar is not None:
                self.grammars.kept.leave()

    def metrics_text(self) -> bytes:
        """See `Metrics.text`."""
        awake, (running, waiting) = [*self.conversations.awake.values()], self.worker.lengths
        return self.metrics.text(
            awake_conversations=len(awake),
            kept_conversations=len(self.store.conversations),
            cache_bytes=sum(live.engine.cache.nbytes for live in awake),
            disk_bytes=self.store.nbytes,
            disk_limit_bytes=self.config.disk,
            disk_free_bytes=self.store.free_bytes,
            running_replies=running,
            waiting_replies=waiting,
        )

    def close(self) -> None:
        """Save and stop."""
        self.grammars.close()
        self.worker.stop()
        self.store.close()


def _sender(waiting: asyncio.Queue[Message]) -> Callable[[Message], None]:
    """Puts messages into a queue, from any thread."""
    loop = asyncio.get_running_loop()

    def send(message: Message) -> None:
        loop.call_soon_threadsafe(waiting.put_nowait, message)

    return send


async def finished(waiting: asyncio.Queue[Message]) -> tuple[Done, list[Message]]:
    """The end of a reply, and its pieces.

    Raises:
        ApiError: there is none.
    """
    pieces: list[Message] = []
    while True:
        message = await waiting.get()
        if isinstance(message, Failed):
            raise message.error
        if isinstance(message, Done):
            return message, pieces
        pieces.append(message)
