"""Sessions on disk: nothing complete is lost, and nothing is left incomplete."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from h2o_stream import ConfigError, H2OStreamError
from h2o_stream.cache.state import MARKS, State
from h2o_stream.errors import DataError
from h2o_stream.session.folders import saved_sessions
from h2o_stream.session.sessions import MAX_STATES, Session
from h2o_stream.session.state_files import StateFiles
from h2o_stream.session.state_format import decode_state
from h2o_stream.session.transcript import Entry, Header, Transcript, export
from tests.disturbances import short_files

HEADER = Header("a-model", "h2o", 256, "Be brief.")


def state(turn: int) -> State:
    return {"number": np.array(turn)}


def filled(folder: Path, turns: int = 3, name: str = "talk") -> Session:
    session = Session(name, folder)
    session.begin(HEADER)
    for turn in range(1, turns + 1):
        session.add(Entry(turn, f"question {turn}", f"answer {turn} ü"), state(turn))
    return session


def turns(session: Session) -> list[int]:
    return [entry.turn for entry in session.transcript.entries]


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with Session("talk", tmp_path) as session:
        assert turns(session) == [1, 2, 3]
        assert session.transcript.entries[1].text == "answer 2 ü"
        assert session.transcript.header.system == "Be brief."
        assert session.state(3) == state(3)
        assert session.state(4) is None


def test_files_are_those_of_torch(tmp_path: Path) -> None:
    """With bfloat16 numbers: earlier versions wrote them by torch."""
    tensors = {"keys": torch.rand(2, 3).bfloat16(), "grid": torch.rand(3).half(), "number": torch.tensor(3)}
    files, path = StateFiles(tmp_path), tmp_path / "state-00000001.safetensors"
    path.write_bytes(save(tensors, {"line": json.dumps({"turn": 3})}))
    state = files.read(1, 3)
    assert state is not None
    assert state["keys"].dtype == np.uint16
    files.write(1, state, {"turn": 3})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(loaded[name].equal(tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize("content", [b"", b"foreign", save({"x": torch.zeros(2).to(torch.float8_e4m3fn)})])
def test_no_file_with_a_state(content: bytes) -> None:
    with pytest.raises(SafetensorError):
        decode_state(content)


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    with filled(tmp_path):
        folder = tmp_path / "talk"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in [*folder.glob("state-*"), folder / "transcript.jsonl"]:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("existing", [False, True])
def test_names_can_be_listed_by_the_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr("h2o_stream.base.resources.data_folder", lambda: data)
    monkeypatch.setattr("h2o_stream.session.folders.data_folder", lambda: data)
    before = os.umask(0o022)
    try:
        if existing:
            (data / "sessions").mkdir(parents=True)
        with Session("talk"), Session("other", tmp_path / "mine"):
            folders = (data, data / "sessions", data / "sessions" / "talk", tmp_path / "mine")
            assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 4
    finally:
        os.umask(before)


def test_a_turn_whose_line_is_missing_is_found_in_its_state(tmp_path: Path) -> None:
    """As after a kill between the two writes."""
    filled(tmp_path).close()
    path = tmp_path / "talk" / "transcript.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with Session("talk", tmp_path) as session:
        assert turns(session) == [1, 2, 3]
    assert Transcript(path).entries[-1].text == "answer 3 ü"


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_an_incomplete_line_is_ignored(tmp_path: Path, cut: int) -> None:
    filled(tmp_path).close()
    for old in (tmp_path / "talk").glob("state-*4.safetensors"):
        old.unlink()
    path = tmp_path / "talk" / "transcript.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    with Session("talk", tmp_path) as session:
        assert turns(session) == [1, 2]
        session.add(Entry(3, "again", "yes"), state(3))
    assert [entry.prompt for entry in Transcript(path).entries] == ["question 1", "question 2", "again"]


def test_a_partly_written_state_is_ignored(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "talk" / "state-00000005.part").write_bytes(b"half")
    (tmp_path / "talk" / "state-00000005.safetensors").write_bytes(b"foreign")
    with Session("talk", tmp_path) as session:
        assert turns(session) == [1, 2, 3]
        assert session.state(3) == state(3)
        assert not list((tmp_path / "talk").glob("*.part"))


def test_turns_are_undone(tmp_path: Path) -> None:
    with filled(tmp_path, 4) as session:
        session.undo(2)
        assert turns(session) == [1, 2]
        assert session.state(3) is None
        session.add(Entry(3, "another", "one"), {"number": np.array(33)})
    with Session("talk", tmp_path) as session:
        assert [entry.prompt for entry in session.transcript.entries] == ["question 1", "question 2", "another"]
        assert session.state(3) == {"number": np.array(33)}
        session.begin(HEADER)
        assert turns(session) == []
        assert session.state(3) is None


def test_the_last_states_are_kept(tmp_path: Path) -> None:
    with filled(tmp_path, 12) as session:
        held = [turn for turn in range(1, 13) if session.state(turn) is not None]
        assert held == list(range(13 - MAX_STATES, 13))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with filled(tmp_path), pytest.raises(DataError, match="open in another process"):
        Session("talk", tmp_path)
    with Session("talk", tmp_path):
        pass


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a" * 65, "a b", "a\n", "𝔘" * 64, "ü" * 65])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a session; --session"):
        Session(name, tmp_path)
    Session("𝔘" * 63, tmp_path).close()


TURN = {"type": "turn", "turn": 1, "prompt": "a", "text": "b", "kind": "said", "finish": "stop", "time": "2026"}
WRONG_TYPES = [json.dumps(TURN | wrong) for wrong in ({"time": 7}, {"text": None}, {"turn": "1"}, {"kind": "other"})]


@pytest.mark.parametrize(
    "line", ["{}", "[]", "1", "nonsense", '{"type": "other"}', '{"type": "turn", "turn": 1}', *WRONG_TYPES]
)
def test_a_damaged_transcript_is_named(tmp_path: Path, line: str) -> None:
    filled(tmp_path).close()
    path = tmp_path / "talk" / "transcript.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match="line 5 is not a line of a transcript"):
        Session("talk", tmp_path)
    assert saved_sessions(tmp_path) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved data stays, whatever can be saved is saved, and the message says which."""
    with filled(tmp_path) as session:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(StateFiles, "write", full)
            with pytest.raises(DataError, match="No space left on device; the text of this turn is saved"):
                session.add(Entry(4, "a", "b"), state(4))
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(DataError, match="this turn is not saved"):
                session.add(Entry(5, "c", "d"), None)
    with Session("talk", tmp_path) as session:
        assert turns(session) == [1, 2, 3, 4]


@pytest.mark.parametrize("limit", range(0, 48, 6))
def test_a_log_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """By a disk that is full for a moment: there is no state that names what its log lacks."""
    write, log = StateFiles._write_log, np.arange(9, dtype=np.int64)
    logged = {"number": np.array(4), "words": log, f"words{MARKS}": np.array([[len(log), 1]])}

    def short(*values: Any) -> str:
        with short_files(limit):
            return write(*values)

    with filled(tmp_path) as session:
        with monkeypatch.context() as patch:
            patch.setattr(StateFiles, "_write_log", short)
            if limit < log.size * 4:
                with pytest.raises(DataError, match="the text of this turn is saved"):
                    session.add(Entry(4, "a", "b"), logged)
            else:
                session.add(Entry(4, "a", "b"), logged)
        assert (session.state(4) is None) == (limit < log.size * 4)
        session.add(Entry(5, "c", "d"), logged)
        assert [*session.state(5)["words"]] == [*log]


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(DataError, match="session talk: Permission denied"):
        Session("talk", tmp_path)


def test_exports(tmp_path: Path) -> None:
    entries = [Entry(1, "question", "answer ü"), Entry(2, "a fact", "", "pinned")]
    export(tmp_path / "talk.md", HEADER, entries)
    text = (tmp_path / "talk.md").read_text()
    assert text.startswith("# a-model, h2o, window 256\n\n> Be brief.\n")
    assert "**You**\n\nquestion\n\n**Model**\n\nanswer ü\n\n**You** (pinned)\n\na fact\n" in text
    export(tmp_path / "talk.json", HEADER, entries)
    exported = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in exported["messages"]] == ["system", "user", "assistant", "user"]
    assert exported["policy"] == "h2o"
    with pytest.raises(H2OStreamError, match="File exists"):
        export(tmp_path / "talk.md", HEADER, entries)
    with pytest.raises(ConfigError, match="must end in .md or .json"):
        export(tmp_path / "talk.txt", HEADER, entries)


def test_a_forked_process_does_not_release_the_lock(tmp_path: Path) -> None:
    with Session("talk", tmp_path) as session:
        child = os.fork()
        if not child:
            session.close()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(DataError, match="open in another process"):
            Session("talk", tmp_path)
