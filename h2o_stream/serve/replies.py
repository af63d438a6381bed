"""What the threads of a server send each other: what is asked, and the pieces of replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.config import SamplingConfig
from h2o_stream.engine.grammar import Grammar
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.messages import Dialogue
from h2o_stream.serve.requests import Options
from h2o_stream.serve.stream import Logprob
from h2o_stream.session.other_calls import Call

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """The conversation is open."""


@dataclass(frozen=True)
class Piece:
    """Some text of a reply and of its thinking; if asked, how likely its tokens were and what is in the cache."""

    text: str
    thinking: str
    logprobs: tuple[Logprob, ...]
    counts: CacheCounts | None = None


@dataclass(frozen=True)
class Seen:
    """Tokens seen before, read for this reply, and replied, of which some are thinking; and where those of the
    conversation are after it.
    """

    before: int
    read: int
    replied: int
    thought: int
    counts: CacheCounts


@dataclass(frozen=True)
class Done:
    """The end of a reply, which is on disk.

    Attributes:
        finish: ``stop``, ``length`` or ``interrupted``.
        text: all of it.
        calls: calls of tools in the reply, if they are recognised.
        thinking: all of it.
        conversation: its id; nothing if it is not kept.
        turn: its number among the turns that a client can go back to.
        origin: see `conversations.Opened`, as the others.
    """

    finish: str
    text: str
    thinking: str
    calls: tuple[Call, ...]
    seen: Seen
    conversation: str
    turn: int
    origin: str
    known: int
    read: int


@dataclass(frozen=True)
class Failed:
    """There will be no reply, or no more of it."""

    error: ApiError


Message = Started | Piece | Done | Failed


@dataclass(eq=False)
class Ask:
    """A reply that is asked for.

    Attributes:
        dialogue: what it replies to; its system prompt and past turns do not count with `after`.
        hashes: hashes of the dialogue after each of its past turns, see `messages.chain`.
        options: options of the conversation.
        config: how it is sampled.
        send: gets what happens, in the worker's thread.
        keep: whether the conversation is saved.
        logprobs: see `requests.Sampled`, as `slots`.
        grammar: what it must follow.
        after: continue after the response of this id.
        response: the id of this one, by which a client goes on after it.
        raw: the user's text is continued as it is, without a chat template; it is not kept.
        calls: whether calls of tools are recognised in it.
        pieces: whether pieces are sent before the end, which has the whole text.
        asked: when it was asked for, on the clock of `time.monotonic`.
    """

    dialogue: Dialogue
    hashes: Sequence[str]
    options: Options
    config: SamplingConfig
    send: Callable[[Message], None]
    keep: bool = True
    logprobs: int | None = None
    slots: bool = False
    grammar: Grammar | None = None
    after: str | None = None
    response: str = ""
    raw: bool = False
    calls: bool = False
    pieces: bool = True
    asked: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since it was asked for."""
        return time.monotonic() - self.asked

    def try_send(self, message: Message) -> bool:
        """Send a message. False if that is not possible any more, for example because the client's loop is closed."""
        if isinstance(message, Piece) and not self.pieces:
            return True
        try:
            self.send(message)
        except Exception as error:  # noqa: BLE001 - a client that is gone must not end the server
            _log.warning("a message cannot be sent to a client: %s", error)
            return False
        return True
