"""Conversation histories: undo, regenerate, fork, and resume in another process."""

from pathlib import Path

import pytest

from h2o_stream import H2OStreamError
from h2o_stream.errors import DataError
from tests.fixtures import with_exhaustive
from tests.histories import TALK, Histories, said

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.mark.parametrize(("policy", "saved"), with_exhaustive(
    [("h2o", True), ("full", False)], [("h2o", False), ("full", True)]
))  # fmt: skip
def test_undo(make_history: Histories, policy: str, saved: bool) -> None:
    """Even after tokens have been evicted."""
    history = make_history(policy)
    if saved:
        history.open("talk")
    replies = said(history, *TALK)
    seen = history.conversation.engine.counts.seen
    assert [entry.prompt for entry in history.undo(2)] == TALK[3:]
    assert [entry.prompt for entry in history.entries] == TALK[:3]
    assert history.conversation.engine.counts.seen < seen
    assert said(history, *TALK[3:]) == replies[3:]
    history.undo(5)
    assert history.entries == []
    assert said(history, *TALK) == replies
    with pytest.raises(H2OStreamError, match="cannot undo 6 turns, there are 5"):
        history.undo(6)
    history.close()


def test_another_reply(make_history: Histories) -> None:
    history = make_history(temperature=1.5)
    first = said(history, TALK[0])
    others = [said(history, history.regenerate()) for _ in range(3)]
    assert any(other != first for other in others)
    assert len(history.entries) == 1
    assert history.entries[0].text == others[-1][0]
    list(history.pin("A fact."))
    with pytest.raises(H2OStreamError, match="no reply"):
        history.regenerate()


def test_a_session_without_a_line_does_not_exist(make_history: Histories, own_home: Path) -> None:
    """Left by a process that ended before it could write."""
    (own_home / "talk").mkdir(parents=True)
    (own_home / "talk" / "transcript.jsonl").touch()
    history = make_history()
    for change in (lambda: list(history.replay("talk")), lambda: history.open("talk", create=False)):
        with pytest.raises(DataError, match="there is no session talk"):
            change()
    assert history.conversation.system == "Be brief."
    assert not history.open("talk")
