"""The index of passages: what it finds, and what it survives."""

import os
import random
import signal
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_stream.errors import H2OStreamError
from h2o_stream.recall import database, index
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import split
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header

Turn = tuple[int, str, str]
TURNS: list[Turn] = [
    (1, "My cat is called Biscuit and he is nine years old.", "What a nice name!"),
    (
        2,
        "The code of the garden gate is still 4821.\n\nMy sister Clara works as a dentist in Porto.",
        "I will remember.",
    ),
    (4, "我的姐姐住在北京市。", "好的。"),
    (5, "Naïve CAFÉ: 30,000.5 euros", "So they run a café."),
]
DAMAGED = "the index of the session was damaged and is rebuilt"


def passages(turn: int, prompt: str, reply: str) -> list[Passage]:
    found = []
    for role, text, start in (("user", prompt, turn * 1000), ("assistant", reply, turn * 1000 + 500)):
        found += [Passage(turn, role, text[p.start : p.stop], start + p.start, start + p.stop) for p in split(text)]
    return found


def content(held: PassageIndex) -> list[Passage]:
    """All its passages, in order."""
    first = held._run(lambda c: [Passage(*row) for row in c.execute(f"{database.PASSAGES} WHERE id = 1")], [])
    return first + held.following(first[0], 1 << 30) if first else []


def expected(turns: Sequence[Turn]) -> list[Passage]:
    return [passage for turn in turns for passage in passages(*turn)]


def found(held: PassageIndex, *terms: str) -> list[str]:
    return [passage.text for passage in held.search(terms, 10)]


def frequency(held: PassageIndex, term: str) -> int:
    return len(held.search([term], 1000))


@pytest.fixture(params=["file", "temporary"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PassageIndex]:
    held = PassageIndex(tmp_path / "index.sqlite" if request.param == "file" else None)
    for turn in TURNS:
        held.add(*turn, passages(*turn))
    yield held
    assert not held.stale
    held.close()


def test_search(filled: PassageIndex) -> None:
    assert content(filled) == expected(TURNS)
    assert len(filled) == len(expected(TURNS))
    assert found(filled, "cats") == [TURNS[0][1]]
    assert found(filled, "naive") == found(filled, "30,000.5") == [TURNS[3][1]]
    assert found(filled, "cafe") == [TURNS[3][2], TURNS[3][1]] or found(filled, "cafe") == [TURNS[3][1], TURNS[3][2]]
    assert found(filled, "dentist in Porto", "nothing") == ["My sister Clara works as a dentist in Porto."]
    assert found(filled, "in dentist Porto") == []
    assert found(filled, "Porto", "cat", "Clara")[0].startswith("My sister")
    assert len(filled.search(["is", "remember", "euros"], 2)) == 2
    assert frequency(filled, "IS") == 2
    assert frequency(filled, "nine years") == 1
    assert frequency(filled, "years nine") == 0


def test_scripts_without_spaces(filled: PassageIndex) -> None:
    assert found(filled, "北京") == found(filled, "姐") == [TURNS[2][1]]
    assert found(filled, "她住在上海") == [TURNS[2][1]]  # has two of the three characters
    assert frequency(filled, "北京") == 1
    assert frequency(filled, "京北") == 0
    filled.add(6, "서울에서 만났어요", "ฉันชอบกินข้าวผัดมาก", passages(6, "서울에서 만났어요", "ฉันชอบกินข้าวผัดมาก"))
    assert found(filled, "서울") == ["서울에서 만났어요"]
    assert found(filled, "ข้าว") == ["ฉันชอบกินข้าวผัดมาก"]


@pytest.mark.parametrize("term", [
    "", " ", '"', '""', "'", "*", "_", "AND", "a OR", "NOT (", "NEAR(cat", "text:cat*", "^cat", "\0", "\ud800", "😀",
    "x" * 1_000_000, "x " * 100_000, "字" * 100_000, "-", "{cat}", "\N{COMBINING ACUTE ACCENT}", "%", ";--",
])  # fmt: skip
def test_any_text_is_a_term(filled: PassageIndex, term: str) -> None:
    """None is taken for a command of the search, and the others are still found."""
    assert TURNS[0][1] in found(filled, term, "Biscuit")
    assert len(filled) == len(expected(TURNS))


@given(st.lists(st.text(max_size=20), max_size=5), st.text(max_size=50))
@settings(max_examples=100)
def test_any_text_is_found_again(terms: list[str], text: str) -> None:
    held = PassageIndex(None)
    passage = Passage(1, "user", f"{text} Biscuit", 0, 5)
    held.add(1, text, "", [passage])
    assert held.search([*terms, "Biscuit"], 3) == [passage]
    assert all(frequency(held, term) in (0, 1) for term in terms)
    assert not held.stale
    held.close()


def test_lone_surrogates_are_replaced(filled: PassageIndex) -> None:
    passage = Passage(9, "user", "a \ud800 zebra\0", 1, 2)
    filled.add(9, "\ud800", "", [passage])
    assert found(filled, "zebra") == ["a \ufffd zebra\0"]
    assert filled.following(passage, 1) == []


def test_following(filled: PassageIndex) -> None:
    everything = expected(TURNS)
    for number, passage in enumerate(everything):
        assert filled.following(passage, 2) == everything[number + 1 : number + 3]
    assert filled.following(Passage(3, "user", "never said", 1, 2), 2) == []


def test_common_words_are_ignored_if_there_are_rarer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_MAX_ROWS", 50)
    held = PassageIndex(None)
    for turn in range(1, 1001):
        said = f"the common words of turn{turn}" + (" and a zebra" if turn == 3 else "")
        held.add(turn, said, "", [Passage(turn, "user", said, turn, turn + 1)])
    assert [passage.turn for passage in held.search(["the", "zebra", "common"], 10)] == [3]
    newest = [passage.turn for passage in held.search(["the"], 100)]
    assert 30 <= len(newest) <= 70
    assert min(newest) > 900
    held.close()


def test_an_add_does_not_read_what_is_there() -> None:
    """The statements of an add take as many steps after 2,000 turns as after 200."""
    held, steps, costs = PassageIndex(None), list[int](), list[int]()
    for turn in range(1, 2001):
        held._connection.set_progress_handler(lambda: steps.append(1), 10)
        held.add(turn, "", "", [Passage(turn, "user", f"some words of turn{turn}", turn, turn + 1)])
        held._connection.set_progress_handler(None, 0)
        costs.append(len(steps))
        steps.clear()
    assert sum(costs[-100:]) < 2 * sum(costs[100:200])
    held.close()


step = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 9)),
    st.tuples(st.just("truncate"), st.integers(0, 9)),
    st.tuples(st.just("sync"), st.lists(st.integers(1, 9), unique=True, max_size=6).map(sorted)),
    st.tuples(st.just("reopen"), st.none()),
)


@given(st.lists(step, max_size=12), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changes(tmp_path: Path, steps: list[tuple[str, object]], data: st.DataObject) -> None:
    """The index has the passages of exactly the turns that it should, and finds each by its own word."""
    path = tmp_path / "index.sqlite"
    path.unlink(missing_ok=True)
    said, held = list[Turn](), PassageIndex(path)
    for number, (kind, value) in enumerate(steps):
        if kind == "add":
            turn = value, f"this is word{number}x and more of it", data.draw(st.sampled_from(["", "so it is"]))
            said = [*(other for other in said if other[0] < value), turn]
            held.add(*turn, passages(*turn))
        elif kind == "truncate":
            said = [turn for turn in said if turn[0] <= value]
            held.truncate(value)
        elif kind == "sync":
            known = {turn[0]: turn for turn in said}
            said = [known.get(turn, (turn, f"word{number}x again", "")) for turn in value]
            held.sync(said, passages)
        else:
            held.close()
            held = PassageIndex(path)
        assert content(held) == expected(said)
        for other in range(number + 1):
            texts = [p for p in expected(said) if f"word{other}x" in p.text]
            assert sorted(held.search([f"word{other}x"], 20), key=lambda p: p.start) == texts
    assert not held.stale
    held.close()


def test_sync_keeps_the_turns_at_the_start(tmp_path: Path) -> None:
    held, asked = PassageIndex(tmp_path / "index.sqlite"), list[int]()

    def asking(turn: int, prompt: str, reply: str) -> list[Passage]:
        asked.append(turn)
        return passages(turn, prompt, reply)

    held.sync(TURNS, asking)
    held.sync(TURNS, asking)
    assert asked == [1, 2, 4, 5, 5]
    changed = [*TURNS[:2], (4, "Something else", "I see."), TURNS[3]]
    held.sync(changed, asking)
    assert asked[5:] == [2, 4, 5]
    assert content(held) == expected(changed)
    held.close()


def test_sync_keeps_nothing_if_the_tokens_are_others(filled: PassageIndex) -> None:
    """A stream that is fed again has no recalled passages, so the tokens of its turns have other indices."""

    def earlier(turn: int, prompt: str, reply: str) -> list[Passage]:
        return [replace(p, start=p.start - turn, stop=p.stop - turn) for p in passages(turn, prompt, reply)]

    filled.sync(TURNS, earlier)
    assert content(filled) == [passage for turn in TURNS for passage in earlier(*turn)]


def test_opened_by_another_thread(path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(PassageIndex, path).result()
    held.add(6, "More", "ok", passages(6, "More", "ok"))
    assert content(held) == expected([*TURNS, (6, "More", "ok")])
    held.close()


def test_a_sync_that_is_cut_off_changes_nothing(filled: PassageIndex) -> None:
    def interrupted(turn: int, prompt: str, reply: str) -> list[Passage]:
        if turn == 7:
            raise KeyboardInterrupt
        return passages(turn, prompt, reply)

    with pytest.raises(KeyboardInterrupt):
        filled.sync([TURNS[0], (6, "New", "ok"), (7, "Never", "ok")], interrupted)
    assert content(filled) == expected(TURNS)
    assert frequency(filled, "New") == 0


def test_only_the_user_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    old = os.umask(0)
    try:
        PassageIndex(path).close()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


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
        deadline = time.monotonic() + 20
        while size_of_transcript() <= before and time.monotonic() < deadline:
            time.sleep(0.002)
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
