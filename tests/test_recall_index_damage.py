"""The index of passages: damage, faults, threads and kills that it survives."""

import os
import random
import signal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from h2o_stream.errors import H2OStreamError
from h2o_stream.recall import database
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Passage
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header
from tests.test_recall_index import TURNS, Turn, content, expected, found, passages
from tests.waiting import wait_for

DAMAGED = "the index of the session was damaged and is rebuilt"


def rebuilt(path: Path) -> PassageIndex:
    """Opens a damaged file, which is said once, and fills it."""
    notices = list[str]()
    held = PassageIndex(path, notices.append)
    assert notices == [DAMAGED]
    assert held.stale
    assert content(held) == []
    held.sync(TURNS, passages)
    assert not held.stale
    assert content(held) == expected(TURNS)
    held.close()
    held = PassageIndex(path, notices.append)
    assert content(held) == expected(TURNS)
    assert notices == [DAMAGED]
    return held


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the turns."""
    held = PassageIndex(tmp_path / "index.sqlite")
    held.sync(TURNS, passages)
    held.close()
    return tmp_path / "index.sqlite"


def test_opened_by_another_thread(path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(PassageIndex, path).result()
    held.add(6, "More", "ok", passages(6, "More", "ok"))
    assert content(held) == expected([*TURNS, (6, "More", "ok")])
    held.close()


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_rebuilt(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    rebuilt(path).close()


def test_a_foreign_file_is_rebuilt(path: Path) -> None:
    path.write_bytes(b"these are no passages\n" * 1000)
    rebuilt(path).close()
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE passages(id)")
    other.close()
    rebuilt(path).close()


@pytest.mark.parametrize("damage", [
    "PRAGMA user_version = 0", "PRAGMA application_id = 5", "DROP TABLE words",
    "DELETE FROM turns WHERE turn = 2", "DELETE FROM passages WHERE id = 2",
    "UPDATE passages SET text = 'My cat is called Whiskers.' WHERE id = 1",
    "UPDATE passages SET start = 7 WHERE id = 1", "DELETE FROM words_data WHERE id > 10",
    "DELETE FROM words_docsize WHERE id = 2",
])  # fmt: skip
def test_a_changed_file_is_rebuilt(path: Path, damage: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(damage)
    connection.close()
    rebuilt(path).close()


def test_damaged_bytes_never_change_what_was_said(path: Path) -> None:
    data, rng = path.read_bytes(), random.Random(0)
    notices = list[str]()
    for _ in range(60):
        damaged = bytearray(data)
        at = rng.randrange(len(data))
        damaged[at : at + 16] = rng.randbytes(16)
        path.write_bytes(damaged)
        held = PassageIndex(path, notices.append)
        found(held, "cat", "the", "北京")
        held.sync(TURNS, passages)
        assert not held.stale
        assert content(held) == expected(TURNS)
        held.close()
    assert len(notices) > 3


def test_a_locked_file_is_rebuilt(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    rebuilt(path).close()
    other.close()


def test_damage_in_the_middle_of_a_chat(path: Path) -> None:
    notices = list[str]()
    held = PassageIndex(path, notices.append)
    data = bytearray(path.read_bytes())
    data[:] = b"x" * len(data)
    path.write_bytes(data)
    turn = (6, "One more thing", "Yes?")
    held.add(*turn, passages(*turn))
    assert notices == [DAMAGED]
    assert held.stale
    assert found(held, "cat") == []
    held.sync([*TURNS, turn], passages)
    assert not held.stale
    assert content(held) == expected([*TURNS, turn])
    assert notices == [DAMAGED]
    held.close()


def test_a_full_disk(path: Path) -> None:
    """The index goes on in a temporary file, and the turns so far are still in the other."""
    notices = list[str]()
    held = PassageIndex(path, notices.append)
    held._connection.execute("PRAGMA max_page_count = 1")
    text = "\n\n".join(f"A long enough paragraph of {n} or more words that must go somewhere." for n in range(400))
    turn = (6, text, "Thanks.")
    held.add(*turn, passages(*turn))
    assert len(notices) == 1
    assert "full" in notices[0]
    assert "temporary" in notices[0]
    assert held.stale
    held.sync([*TURNS, turn], passages)
    assert not held.stale
    assert content(held) == expected([*TURNS, turn])
    assert len(notices) == 1
    held.close()
    held = PassageIndex(path, notices.append)
    assert content(held) == expected(TURNS)
    assert len(notices) == 1
    held.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "index.sqlite", tmp_path):
        notices = list[str]()
        held = PassageIndex(path, notices.append)
        assert len(notices) == 1
        assert "temporary" in notices[0]
        held.sync(TURNS, passages)
        assert content(held) == expected(TURNS)
        assert not held.stale
        held.close()


def test_no_place_for_any_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat goes on without an index."""
    notices = list[str]()

    def refuse(path: Path | None) -> sqlite3.Connection:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(database, "connect", refuse)
    held = PassageIndex(path, notices.append)
    assert [notice for notice in notices if "is off" in notice] == notices[1:]
    held.sync(TURNS, passages)
    held.add(6, "More", "ok", [])
    held.truncate(1)
    assert (len(held), found(held, "cat"), held.stale) == (0, [], False)
    held.close()


def test_errors_without_end_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    notices = list[str]()
    held = PassageIndex(None, notices.append)

    def fail(*_: object) -> None:
        raise sqlite3.DatabaseError("always")

    monkeypatch.setattr(database, "add", fail)
    for _ in range(10):
        held.sync(TURNS, passages)
    assert notices == ["the index of the session is off: always"]
    assert not held.stale
    assert held.search(["cat"], 3) == []


def test_a_python_without_full_text_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_SCHEMA", "CREATE VIRTUAL TABLE words USING fts6(text)")
    with pytest.raises(H2OStreamError, match="has no FTS5"):
        PassageIndex(None)


def test_a_closed_index_is_empty(path: Path) -> None:
    held = PassageIndex(path)
    held.close()
    held.close()
    held.add(6, "More", "ok", passages(6, "More", "ok"))
    assert (len(held), held.search(["cat"], 1), held.stale) == (0, [], False)


def chat_forever(folder: Path, seed: int) -> None:
    """Adds, undoes and syncs at random beside a transcript."""
    rng, header = random.Random(seed), Header("model", "h2o", 256, None)
    session = Session("chat", folder)
    held = PassageIndex(folder / "chat" / "index.sqlite")
    held.sync(turns_of(session), passages)
    while True:
        said = turns_of(session)
        number = said[-1][0] + 1 if said else 1
        if said and rng.random() < 0.2:
            number = rng.randint(max(0, number - 4), number - 1)
            session.undo(number)
            held.truncate(number)
        elif rng.random() < 0.1:
            held.sync(said[: rng.randint(0, len(said))], passages)
            held.sync(said, passages)
        else:
            prompt = "\n\n".join(f"Fact {rng.random()} is what I tell you in turn {number}." for _ in range(9))
            session.add(Entry(number, prompt, "I see."), None, header)
            held.add(number, prompt, "I see.", passages(number, prompt, "I see."))


def turns_of(session: Session) -> list[Turn]:
    return [(entry.turn, entry.prompt, entry.text) for entry in session.transcript.entries]


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """After each of ten kills, what was in the index is consistent, and after `sync` it agrees with the transcript."""
    rng, kept, most = random.Random(0), 0, 0
    transcript = tmp_path / "chat" / "transcript.jsonl"

    def size_of_transcript() -> int:
        return transcript.stat().st_size if transcript.exists() else 0

    for number in range(10):
        before = size_of_transcript()
        child = os.fork()
        if not child:
            try:
                chat_forever(tmp_path, number)
            finally:
                os._exit(1)
        wait_for(lambda before=before: size_of_transcript() > before)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        notices, asked = list[str](), list[int]()

        def asking(turn: int, prompt: str, reply: str, asked: list[int] = asked) -> list[Passage]:
            asked.append(turn)
            return passages(turn, prompt, reply)

        with Session("chat", tmp_path) as session:
            said = turns_of(session)
            held = PassageIndex(tmp_path / "chat" / "index.sqlite", notices.append)
            held.sync(said, asking)
            assert notices == []
            assert content(held) == expected(said)
            kept, most = kept + (len(asked) <= 2), max(most, len(said))
            for turn in said[-3:]:
                assert held.search([turn[1].split()[1]], 1)[0].turn == turn[0]
            held.close()
    assert kept >= 3  # often, only the turn of the kill is missing
    assert most > 3, most
