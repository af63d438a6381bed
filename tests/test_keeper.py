"""Turns that are taken back, given again, branched and taken up in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Conversation, Engine, H2OStreamError, SamplingConfig
from h2o_stream.errors import DataError
from h2o_stream.session.keeper import Keeper, NoFitError
from h2o_stream.session.states import StateFiles
from h2o_stream.session.transcript import Header
from h2o_stream.session.turn import Turn

TALK = ["Tell me about the sea.", "And the tower?", "What about the light?", "Thanks, go on.", "And then?"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@pytest.fixture
def make(talker: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase) -> Iterator[Callable[..., Keeper]]:
    """Makes keepers of conversations of their own with the same model."""
    model, engines = talker(), list[Engine]()

    def keeper(policy: str = "h2o", temperature: float = 0.0) -> Keeper:
        while engines:
            engines.pop().close()
        sampling = SamplingConfig(temperature=temperature, seed=5, max_tokens=10)
        engines.append(Engine(model, tokenizer, CacheConfig(policy, 64), sampling))
        return Keeper(Conversation(engines[-1], "Be brief."), Header("tiny", policy, 64, None))

    yield keeper
    while engines:
        engines.pop().close()


def said(keeper: Keeper, *texts: str) -> list[str]:
    return [next(event.text for event in keeper.say(text) if isinstance(event, Turn)) for text in texts]


@pytest.mark.parametrize("policy", ["h2o", "full"])
@pytest.mark.parametrize("saved", [True, False])
def test_undo(make: Callable[..., Keeper], policy: str, saved: bool) -> None:
    """Although tokens have been evicted since."""
    keeper = make(policy)
    if saved:
        keeper.open("talk")
    replies = said(keeper, *TALK)
    seen = keeper.conversation.engine.counts.seen
    assert [entry.prompt for entry in keeper.undo(2)] == TALK[3:]
    assert [entry.prompt for entry in keeper.entries] == TALK[:3]
    assert keeper.conversation.engine.counts.seen < seen
    assert said(keeper, *TALK[3:]) == replies[3:]
    keeper.undo(5)
    assert keeper.entries == []
    assert said(keeper, *TALK) == replies
    with pytest.raises(H2OStreamError, match="6 turns cannot be taken back, there are 5"):
        keeper.undo(6)
    keeper.close()


def test_undo_has_an_end(make: Callable[..., Keeper]) -> None:
    keeper = make()
    said(keeper, *TALK, *TALK)
    with pytest.raises(H2OStreamError, match="cannot be taken back"):
        keeper.undo(9)
    assert len(keeper.entries) == 10
    keeper.undo(7)
    assert len(keeper.entries) == 3


def test_another_reply(make: Callable[..., Keeper]) -> None:
    keeper = make(temperature=1.5)
    first = said(keeper, TALK[0])
    others = [said(keeper, keeper.again()) for _ in range(3)]
    assert any(other != first for other in others)
    assert len(keeper.entries) == 1
    assert keeper.entries[0].text == others[-1][0]
    list(keeper.pin("A fact."))
    with pytest.raises(H2OStreamError, match="no reply"):
        keeper.again()


def test_a_session_goes_on(make: Callable[..., Keeper]) -> None:
    whole = said(make(temperature=1.0), *TALK)
    keeper = make(temperature=1.0)
    assert not keeper.open("talk")
    first = said(keeper, *TALK[:2])
    keeper.close()
    keeper = make(temperature=1.0)
    assert keeper.open("talk")
    assert [entry.prompt for entry in keeper.entries] == TALK[:2]
    assert first + said(keeper, *TALK[2:]) == whole
    keeper.undo(4)
    assert said(keeper, *TALK[1:2]) == whole[1:2], "draws are those of then"
    keeper.close()


def test_a_branch(make: Callable[..., Keeper]) -> None:
    keeper = make()
    replies = said(keeper, *TALK[:3])
    keeper.fork("one")
    keeper.save("copy")
    said(keeper, "Something else.")
    keeper.fork("two")
    keeper.undo()
    keeper.close()
    keeper = make()
    for name, turns in (("one", 4), ("two", 3), ("copy", 3)):
        assert keeper.open(name)
        assert len(keeper.entries) == turns
    rest = said(keeper, *TALK[3:])
    assert replies + rest == said(make(), *TALK)
    with pytest.raises(H2OStreamError, match="already"):
        keeper.save("one")
    keeper.close()


def test_another_policy_does_not_fit_and_hears_it_again(make: Callable[..., Keeper]) -> None:
    keeper = make("sink")
    keeper.open("talk")
    said(keeper, *TALK[:2])
    list(keeper.pin("The code is 4711."))
    before = keeper.entries
    keeper.close()
    keeper = make("h2o")
    with pytest.raises(NoFitError, match="session talk cannot be gone on from where it was: .* another policy"):
        keeper.open("talk")
    list(keeper.retell("talk"))
    assert [(entry.prompt, entry.text) for entry in keeper.entries] == [(e.prompt, e.text) for e in before]
    assert keeper.conversation.pins == ["The code is 4711."]
    keeper.close()
    keeper = make("h2o")
    assert keeper.open("talk")
    assert keeper.header().policy == "h2o"
    keeper.close()


def test_a_full_disk_is_told_with_the_turn(make: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = make()
    keeper.open("talk")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    assert keeper.session is not None
    monkeypatch.setattr(StateFiles, "write", full)
    turn = next(event for event in keeper.say("Hello.") if isinstance(event, Turn))
    assert "No space left on device" in turn.detail
    assert turn.text
    assert len(keeper.entries) == 1
    with pytest.raises(DataError, match="the state of the cache is not"):
        list(keeper.tell("What is the code?", "4711."))
    with pytest.raises(DataError, match="the state of the cache is not"):
        list(keeper.pin("The code is 4711."))
    assert [entry.kind for entry in keeper.entries] == ["said", "told", "pinned"]
    keeper.close()


def test_a_session_without_a_line_is_none(make: Callable[..., Keeper], tmp_path: Path) -> None:
    """Begun by a process that ended before it could write."""
    folder = tmp_path / "h2o-stream" / "sessions" / "talk"
    folder.mkdir(parents=True)
    (folder / "transcript.jsonl").touch()
    keeper = make()
    for change in (lambda: list(keeper.retell("talk")), lambda: keeper.open("talk", create=False)):
        with pytest.raises(DataError, match="there is no session talk"):
            change()
    assert keeper.conversation.system == "Be brief."
    assert not keeper.open("talk")
