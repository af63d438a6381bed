"""Recall: what a conversation said is indexed turn by turn, and searched for what a message asks for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path

from h2o_stream.base.progress import ignore
from h2o_stream.cache.holders import retrieval_holders
from h2o_stream.config import RecallConfig, RecallMode
from h2o_stream.engine.engine import Engine
from h2o_stream.recall.answer_head import Place
from h2o_stream.recall.answers import Answers
from h2o_stream.recall.decision import HELD, decide
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.located import locate
from h2o_stream.recall.passage import Candidate, Gone, Passage, Recalled, SaidTurn, Whole
from h2o_stream.recall.passages import split
from h2o_stream.recall.terms import TermWeights
from h2o_stream.recall.wholes import MAX_PIECES, MAX_WHOLE, MIN_REPLY, cut_pieces, find_whole

MAX_TURNS, MAX_CHARACTERS, MAX_OLDER = 1000, 2**20, 8
"""Where a whole is looked for: the newest turns, up to so many and so long, and older ones with words of the message.
"""


class Recall:
    """Finds the passages of one conversation that a message asks for and that the cache no longer holds.

    The index is not opened before it is needed. It follows the conversation: `add` after each turn, `truncate` when the
    conversation goes back. Whenever it may differ from what was said, it is compared with `source` and corrected.

    Attributes:
        last: what was decided about the candidates for the last message.
        source: returns all turns of the conversation; None if nobody keeps them but the index.
        notify: receives a line for the user when the index had to be rebuilt or cannot be written.
        in_pieces: whether a reply may be made aside, over the pieces of a long text, or the text is read at once.
        defers: whether turns are indexed by `add_deferred`, or when something is to be found, and not when they end.
    """

    def __init__(
        self,
        engine: Engine,
        config: RecallConfig,
        turn_tokens: Callable[[int], range],
        place: Callable[[], Place | None],
    ) -> None:
        self.config = config
        self.last: tuple[Candidate, ...] = ()
        self.source: Callable[[], Sequence[SaidTurn]] | None = None
        self.notify: Callable[[str], None] = ignore
        self.defers, self.in_pieces = False, True
        self._deferred = list[SaidTurn]()
        self._engine, self._turn_tokens, self._answers = engine, turn_tokens, Answers(engine, place)
        self._mode: RecallMode = config.mode
        self._path: Path | None = None
        self._opened: PassageIndex | None = None
        self._num_turns: int | None = None  # later turns of the index are not part of the conversation
        self._in_sync = True

    @property
    def mode(self) -> RecallMode:
        """``auto``, ``wide`` or ``off``."""
        return self._mode

    @mode.setter
    def mode(self, mode: RecallMode) -> None:
        self._mode, self._in_sync = mode, False

    @property
    def budget(self) -> int:
        """Tokens that may be read again in a turn: never more than half of what pins leave in the window."""
        wanted = self._engine.cache.plan.window // 4 if self.config.budget is None else self.config.budget
        return min(wanted, self._limit)

    @property
    def list_budget(self) -> int:
        """Tokens that may be read again where several things are asked for: twice the budget, up to the same limit."""
        return min(2 * self.budget, self._limit)

    @property
    def in_sync(self) -> bool:
        """Whether nothing has to be indexed before something is found."""
        return self._mode == "off" or (self._in_sync and not self._deferred)

    @property
    def _limit(self) -> int:
        cache = self._engine.cache
        return max((cache.plan.window - sum(map(len, cache.windows.protected))) // 2, 0)

    def takes_long(self, message: str) -> bool:
        """Whether `find` has to index something, reads passages with the model, or looks for a whole."""
        looked = list[None]()

        def turns() -> list[SaidTurn]:
            looked.append(None)
            return []

        find_whole(message, turns)
        return bool(looked) or not self.in_sync or self._mode == "wide"

    def find(self, message: str) -> Recalled:
        """What to read again before a message."""
        whole = self._find_whole(message)
        gone: Gone = ""
        if whole is not None:
            if whole.rest and (answers := self._recalled(whole.rest, whole)):
                return Recalled(answers)
            pieces, gone = self._pieces(whole)
            if pieces:
                self.last = pieces
                return Recalled(pieces, whole)
        return Recalled(self._recalled(message), whole, gone)

    def _recalled(self, message: str, whole: Whole | None = None) -> tuple[Candidate, ...]:
        """The passages to read again before a message; if a whole is given, only those of it."""
        self.last = tuple(self.decide(message)) if self._mode != "off" else ()
        recalled = tuple(candidate for candidate in self.last if candidate.verdict == "recalled")
        if whole is None:
            return recalled
        return tuple(one for one in recalled if one.passage.turn == whole.turn and one.excerpt in whole.text)

    def _find_whole(self, message: str) -> Whole | None:
        """What a message asks for as a whole, if the cache no longer has it."""
        if not self._engine.tokens or self._engine.cache.plan.policy == "full" or self.source is None:
            return None
        turns = cache(partial(self._turns_with_whole, message))
        whole = find_whole(message, turns)
        if whole is None or not whole.turn:
            return whole
        turn = next(turn for turn in turns() if turn[0] == whole.turn)
        text = turn[1] if whole.role == "user" else turn[2]
        start, stop, first = 0, len(self._engine.tokens), text.find(whole.text)
        if first >= 0:  # it is not all that was said
            passages = (passage for passage in self._finder()(*turn) if passage.role == whole.role)
            inside = [
                passage
                for part, passage in zip(split(text), passages, strict=True)
                if part.start < first + len(whole.text) and first < part.stop
            ]
            start, stop = inside[0].start, inside[-1].stop
        share = retrieval_holders(self._engine.cache).share(start, stop)
        return None if share >= HELD else replace(whole, start=start, stop=stop, held=share)

    def _turns_with_whole(self, message: str) -> list[SaidTurn]:
        """The turns in which a whole is looked for, however many there are: the newest, and older ones with words of
        the message.
        """
        assert self.source is not None
        turns, newest, size = self.source(), list[SaidTurn](), 0
        for turn in islice(reversed(turns), MAX_TURNS):
            size += len(turn[1]) + len(turn[2])
            if newest and size > MAX_CHARACTERS:
                break
            newest.append(turn)
        if len(newest) == len(turns) or self._mode == "off":
            return newest[::-1]
        self.synchronize()
        older = {passage.turn for passage in self._index.search(message.split(), MAX_OLDER)}
        places = (bisect_left(turns, number, key=itemgetter(0)) for number in sorted(older) if number < newest[-1][0])
        return [*(turns[place] for place in places), *newest[::-1]]

    def _pieces(self, whole: Whole) -> tuple[tuple[Candidate, ...], Gone]:
        """The pieces in which a whole is read again; or none, and why."""
        if not whole.turn:
            return (), "never given"
        if self._mode == "off":
            return (), "off"
        if len(whole.text) > MAX_CHARACTERS or (tokens := self._count_tokens(whole.text)) > MAX_WHOLE:
            return (), "too long"
        max_pieces = min(MAX_PIECES, self._engine.sampling.max_tokens // MIN_REPLY) if self.in_pieces else 1
        count = max(min(-(-tokens // max(self._limit, 1)), max_pieces), 1)
        pieces = [
            (text, self._count_tokens(text)) for text in cut_pieces(whole.text, tokens / count, self._count_tokens)
        ]
        passage = Passage(whole.turn, whole.role, whole.text, whole.start, whole.stop)
        return tuple(
            Candidate(passage, text, 1.0, (whole.name,), whole.held, count, "recalled") for text, count in pieces
        ), ""

    def decide(self, message: str) -> list[Candidate]:
        """What would be read again before a message, and what not and why; best first."""
        if not self._engine.tokens or self._engine.cache.plan.policy == "full":
            return []
        self.synchronize()
        holders = retrieval_holders(self._engine.cache)
        index = self._index
        return decide(
            message, index, self.terms, holders.share, self.budget, self.list_budget, self._count_tokens,
            lambda question: self._answers.find(question, index) if self._mode == "wide" else None,
        )  # fmt: skip

    def add(self, turn: int, prompt: str, reply: str) -> None:
        """Index a turn that is in the stream."""
        if self._mode != "off":
            self._deferred.append((turn, prompt, reply))
            if not self.defers:
                self.add_deferred()

    def add_deferred(self) -> None:
        """Index the turns that `add` has noted, and compare the index with `source` if it may differ."""
        if self.in_sync:
            return
        self.synchronize()
        if self._mode == "wide":
            self._answers.read(self._index)

    def truncate(self, turn: int) -> None:
        """The conversation has gone back to this turn; 0 for its start."""
        self._num_turns = turn if self._num_turns is None else min(turn, self._num_turns)
        self._deferred = [deferred for deferred in self._deferred if deferred[0] <= turn]

    def use(self, path: Path | None) -> None:
        """Keep the index in this file from now on, or in a temporary one. It is compared with `source` when used."""
        self.close()
        self._path = path

    def invalidate(self) -> None:
        """The conversation was replaced: compare the index with `source` before it is used again."""
        self._num_turns, self._in_sync, self._deferred = None, False, []

    def synchronize(self) -> None:
        """Make the index match `source`, if it may differ."""
        self._apply_truncation()
        if self._mode != "off" and self.source is not None and (not self._in_sync or self._index.stale):
            self._index.sync(self.source(), self._finder())
            self._in_sync = True
        for deferred in self._deferred if self._mode != "off" else ():
            self._index.add(*deferred, self._finder()(*deferred))
        self._deferred = []

    def close(self) -> None:
        """Close the index. It is opened again when it is needed."""
        opened, self._opened = self._opened, None
        self.invalidate()
        if opened is not None:
            opened.close()

    def _apply_truncation(self) -> None:
        num_turns, self._num_turns = self._num_turns, None
        if num_turns is not None and self._opened is not None:
            self._opened.truncate(num_turns)

    @property
    def _index(self) -> PassageIndex:
        if self._opened is None:
            self._opened = PassageIndex(self._path, self.notify)
        return self._opened

    @cached_property
    def terms(self) -> TermWeights:
        """Weights of words. They depend on the model only: conversations on one model can share them."""
        return TermWeights(self._engine.tokenizer, self._engine.served.read_embeddings)

    def _count_tokens(self, text: str) -> int:
        return len(self._engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _finder(self) -> Callable[[int, str, str], list[Passage]]:
        """Finds the passages of turns in the present stream."""
        turn_tokens, stream, tokenizer = self._turn_tokens, self._engine.tokens, self._engine.tokenizer

        def passages(turn: int, prompt: str, reply: str) -> list[Passage]:
            span = turn_tokens(turn)
            return locate(tokenizer, stream[span.start : span.stop], span.start, turn, prompt, reply)

        return passages
