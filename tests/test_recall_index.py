"""The index of passages: what it finds, and what it holds after changes."""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_stream.recall import database, index
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import split
from tests.in_turn import in_turn

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


@in_turn("term", [
    "", " ", '"', '""', "'", "*", "_", "AND", "a OR", "NOT (", "NEAR(cat", "text:cat*", "^cat", "\0", "\ud800", "😀",
    "x" * 1_000_000, "x " * 100_000, "字" * 100_000, "-", "{cat}", "\N{COMBINING ACUTE ACCENT}", "%", ";--",
])  # fmt: skip
def test_any_text_is_a_term(filled: PassageIndex, term: str) -> None:
    """None is taken for a command of the search, and the others are still found."""
    assert TURNS[0][1] in found(filled, term, "Biscuit")
    assert len(filled) == len(expected(TURNS))


@given(st.lists(st.text(max_size=20), max_size=5), st.text(max_size=50))
@settings(max_examples=40)
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
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_passages_with_those_around_them_and_how_rare_words_are() -> None:
    index = PassageIndex()
    for turn, text in enumerate(("one apple", "two pears", "three pears", "four plums", "five figs"), 1):
        index.add(turn, text, "", [Passage(turn, "user", text, turn, turn + 1)])
    assert sorted(index.around(["plums"], 5, 1)) == [3, 4, 5]
    assert index.around(["plums"], 5, 1)[4].text == "four plums"
    never, once, twice = index.rarity(["cherries", "apple", "pears"])
    assert never > once > twice > 0
    index.close()


def test_sync_keeps_nothing_if_the_tokens_are_others(filled: PassageIndex) -> None:
    """A stream that is fed again has no recalled passages, so the tokens of its turns have other indices."""

    def earlier(turn: int, prompt: str, reply: str) -> list[Passage]:
        return [replace(p, start=p.start - turn, stop=p.stop - turn) for p in passages(turn, prompt, reply)]

    filled.sync(TURNS, earlier)
    assert content(filled) == [passage for turn in TURNS for passage in earlier(*turn)]


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
