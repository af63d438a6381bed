"""What happens in a turn: what is new of a dialogue is read, then replied to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.models.turn_tokens import with_bos
from h2o_stream.recall.passage import Recalled
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.live import Live, Opened
from h2o_stream.serve.messages import Dialogue, as_fed
from h2o_stream.serve.stream import Waits
from h2o_stream.session.messages import UserTurn, text_of
from h2o_stream.session.reply import GrowingReply
from h2o_stream.session.transcript import Entry
from h2o_stream.session.turn import Turn

Event = Recalled | PrefillProgress | Waits | Token | Turn | Finished


def turn_events(opened: Opened, dialogue: Dialogue) -> Iterator[Event]:
    """Read what is new of a dialogue, then reply. Notes the turns that were read.

    Yields:
        The events of `Conversation.say`; `Finished` if something could not be read.
    """
    live, conversation = opened.live, opened.live.conversation
    if not conversation.engine.tokens:
        for pin in live.options.pins:
            yield from _read(conversation.pin(pin))
            live.add(Entry(conversation.metadata.turns, pin, "", "pinned"))
    for turn in as_fed(opened.unread, dialogue.user):
        if turn.reply is None:
            live.merged = turn.exchanges
            keep = conversation.stops and conversation.engine.tokens
            live.undone = conversation.state_dict() if keep else None
            yield from conversation.say(turn.user, dialogue.begun)
            return
        yield from _read(conversation.feed_turn(turn.user, turn.reply))
        entry = Entry(conversation.metadata.turns, text_of(turn.user), turn.reply, "told")
        live.add(entry, *turn.exchanges)


def corrected_events(live: Live, user: UserTurn, turn: Turn) -> Iterator[Event]:
    """Read a turn as its client has seen it, in place of what a stop string cut off, too. Yields the turn at last."""
    conversation = live.conversation
    if live.undone is None:
        conversation.reset()
    else:
        conversation.load_state_dict(live.undone)
    yield from _read(conversation.feed_turn(user, turn.text, own=True))
    yield replace(turn, counts=live.engine.counts, cut=False)


def raw_events(opened: Opened, dialogue: Dialogue) -> Iterator[Event]:
    """Read a text, then continue it. Yields the same events."""
    text = text_of(dialogue.user)
    engine, reply = opened.live.engine, GrowingReply(text)
    for event in engine.prefill(
        with_bos(engine.tokenizer, engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    ):
        if isinstance(event, Finished):
            yield reply.finish(1, event, engine)
            return
        if isinstance(event, PrefillProgress):
            reply.add_progress(event)
        yield event
    for generated in engine.decode():
        if isinstance(generated, Finished):
            yield reply.finish(1, generated, engine)
        else:
            yield reply.add_token(generated) if isinstance(generated, Token) else generated


def _read(events: Iterator[PrefillProgress | Finished]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Finished):
            raise ApiError(400, f"the conversation cannot be read: {event.detail or event.reason}", "messages")
        yield event
