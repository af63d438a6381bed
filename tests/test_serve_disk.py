"""The disk of a server: full, cut off, damaged, of others, or gone with the process; what was saved is there."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.errors import DataError
from h2o_stream.serve.store import Kept, Store
from h2o_stream.session import state_files
from h2o_stream.session.sessions import Session
from tests import served
from tests.disturbances import fail_once, full_disk
from tests.native_builds import needs_library
from tests.serve_kill import Server, kill_under_load
from tests.served import Running, reply

pytestmark = needs_library


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("served"), tiny_folder) as running:
        yield running


_goes_on = served.goes_on


def test_a_full_disk(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation goes on from its last turn that was saved; the others are saved meanwhile."""
    first, other = reply(server.say("One.")), reply(server.say("Another."))
    with monkeypatch.context() as patch:
        failed = fail_once(patch, state_files, "atomic_file", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        status, answer = server.ask("One.", first, "Two.")
        assert server.say("Another.", other, "Two.")["h2o"]["origin"] == "continued"
    assert failed
    error = answer["error"]
    assert (status, error["code"], error["type"]) == (500, "not_saved", "server_error")
    assert error["message"].endswith("No space left on device")
    second = server.say("One.", first, "Two.")
    assert (second["h2o"]["origin"], second["h2o"]["turn"]) == ("continued", 2)
    assert [entry.prompt for entry in server.entries(second["h2o"]["conversation"], 2)] == ["One.", "Two."]
    assert server.say("One.", first, "Two.", reply(second), "Three.")["h2o"]["origin"] == "continued"


@pytest.mark.parametrize("stays", [False, True], ids=["for a moment", "from then on"])
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_disk_that_is_full_at_any_call(tmp_path: Path, tiny_folder: Path, stays: bool, step: int) -> None:
    """What was answered is kept, also after a restart; what was refused can be asked again."""
    kept, refused, first = list[list[str]](), 0, 2 * stays + 1 - step

    def note(messages: list[str], answer: Any) -> None:
        kept.append([*messages, reply(answer)])

    with Running(tmp_path, tiny_folder, states=9) as server:
        while True:
            first += step
            begun = [f"Talk {first}.", reply(server.say(f"Talk {first}."))]
            talks = [[*begun, "What?"], [*begun, "Or what?"], [f"Another talk {first}."]]
            with full_disk(first, 10**9 if stays else first) as calls:
                answers = [server.ask(*talk) for talk in talks]
            for talk, (status, answer) in zip(talks, answers, strict=True):
                if status == 200:
                    note(talk, answer)
                else:
                    assert answer["error"]["code"] == "not_saved"
                    refused += 1
                    note(talk, server.say(*talk))
            if calls() < first:
                break
        for talk in kept:
            assert server.say(*talk, "And then?")["h2o"]["turns_known"] == len(talk) // 2
    assert refused >= first // step - 1
    assert not [*tmp_path.rglob("*.part")]
    with Running(tmp_path, tiny_folder, states=9) as again:
        for talk in kept:
            assert again.say(*talk, "And now?")["h2o"]["turns_known"] == len(talk) // 2


def test_a_first_turn_on_a_full_disk_leaves_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {*server.service.store.conversations}
    with monkeypatch.context() as patch:
        fail_once(patch, state_files, "atomic_file", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert server.ask("Full.")[0] == 500
    assert {*server.service.store.conversations} == before
    assert server.say("Full.")["h2o"]["origin"] == "new"


@pytest.mark.parametrize("share", [0, 0.01, 0.9])
def test_states_that_a_power_failure_has_cut_off(server: Running, share: float) -> None:
    """They are not waited for when a turn is saved. What is lost is read again."""
    asked = f"After {share} of it?"
    first = server.say(asked)
    server.say(asked, reply(first), "And then?")
    folder = server.service.store._folder / first["h2o"]["conversation"]
    for path in folder.glob("state-*"):
        os.truncate(path, int(share * path.stat().st_size))
    again = server.say(asked, reply(first), "And then?")["h2o"]
    assert (again["origin"], again["turns_read"]) == ("read", 1)
    assert [entry.prompt for entry in server.entries(again["conversation"], 2)] == [asked, "And then?"]


def test_a_folder_has_one_server(server: Running, tmp_path: Path) -> None:
    """Until it is closed, by whichever thread. The second one changes nothing."""
    first, model, folder = server.say("Mine?"), server.service.model.model.digest, server.service.store._folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(DataError, match=f"another h2o-serve uses {folder}; give each a --folder of its own"):
        Store(folder, model, 3, 2**30, 1e6)
    assert all(path.name == "server.lock" or path.stat().st_mtime_ns == time for path, time in before.items())
    assert server.say("Mine?", reply(first), "Still?")["h2o"]["origin"] == "continued"
    closing = threading.Thread(target=Store(tmp_path, model, 3, 2**30, 1e6).close)
    closing.start()
    closing.join()
    Store(tmp_path, model, 3, 2**30, 1e6).close()


def test_turns_without_a_state_are_not_looked_for(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole transcript was read for each turn before one to which a client returned, while others waited."""
    opened, original = list[str](), Store._session

    def session(self: Store, kept: Kept, create: bool) -> Session:
        opened.append(kept.id)
        return original(self, kept, create)

    monkeypatch.setattr(Store, "_session", session)
    with Running(tmp_path, tiny_folder, running=1, awake=1) as server:
        texts = [word for number in range(9) for word in (f"{number}?", "Yes.")]
        for _ in range(3):
            texts += ["More?", reply(server.say(*texts, "More?"))]
        long = opened[0]
        server.say("Others?")  # the first one sleeps
        opened.clear()
        assert server.say(*texts[:16], "Else?")["h2o"]["origin"] == "read"
        assert long not in opened
        assert server.say(*texts[:20], "Else?")["h2o"]["origin"] == "branched"
        store = server.service.store
        for kept in store.conversations.values():
            assert sum(kept.id in names for names in store._by_hash.values()) <= 3
        for kept in [*store.conversations.values()]:
            store.forget(kept)
        assert not store._by_hash


def test_files_of_earlier_versions_are_read(server: Running, tmp_path: Path) -> None:
    first = server.say("One.")
    name, folder = first["h2o"]["conversation"], tmp_path / first["h2o"]["conversation"]
    shutil.copytree(server.service.store._folder / name, folder)
    about, *turns = map(json.loads, (folder / "serve.jsonl").read_text().splitlines())
    hashes, counts = zip((about.pop("first"), 0), *(turn[:2] for turn in turns), strict=True)
    (folder / "serve.json").write_text(json.dumps({**about, "hashes": hashes, "turns": counts}))
    (folder / "serve.jsonl").unlink()
    store = Store(tmp_path, server.service.model.model.digest, 3, 2**30, 1e6)
    assert [(kept.id, turn) for kept, turn in store.with_hash(hashes[1], "")] == [(name, 1)]
    assert not (folder / "serve.json").exists()
    store.close()


def test_a_conversation_that_was_never_written_is_deleted(server: Running, tmp_path: Path) -> None:
    """A server that is killed while it saves the first turn leaves a folder without one."""
    model = server.service.model.model.digest
    for name in ("a" * 32, "kept-by-the-user"):
        (tmp_path / name).mkdir()
        record = {"model": model, "key": [], "system": None, "hashes": ["a", "b"], "turns": [0, 1]}
        (tmp_path / name / "serve.json").write_text(json.dumps(record))
    store = Store(tmp_path, model, 3, 2**30, 1e6)
    assert not store.conversations
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["kept-by-the-user"]
    store.close()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [_fifo, _device, _circle, _folder, Path.unlink])
def test_a_file_that_is_something_else_costs_its_conversation_only(
    server: Running, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Whatever stands in place of whichever of its files, the others are found, and nothing is waited for."""
    names = [server.say(f"{text}, {change.__name__}.")["h2o"]["conversation"] for text in ("This", "That")]
    model, folder = server.service.model.model.digest, server.service.store._folder
    for number, file in enumerate(sorted((folder / names[0]).iterdir())):
        copy = tmp_path / str(number)
        for name in names:
            shutil.copytree(folder / name, copy / name)
        change(copy / names[0] / file.name)
        store = Store(copy, model, 3, 2**30, 1e6)
        assert names[1] in store.conversations
        if kept := store.conversations.get(names[0]):
            store.saved(kept, 1)
        assert store.saved(store.conversations[names[1]], 1)
        store.close()


def test_conversations_of_other_users_are_left_alone(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history whose conversation cannot be written any more is read again; one that cannot even be seen keeps no
    server from starting.
    """
    names, folder = [server.say(f"{text} is whose?")["h2o"]["conversation"] for text in "ABC"], tmp_path / "served"
    for name in names:
        shutil.copytree(server.service.store._folder / name, folder / name)
    access, stat = os.access, Path.stat

    def refusing(path: Path, **options: Any) -> os.stat_result:
        if names[1] in path.parts[:-1]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "access", lambda path, mode: names[0] not in str(path) and access(path, mode))
    monkeypatch.setattr(Path, "stat", refusing)
    store = Store(folder, server.service.model.model.digest, 3, 2**30, 1e6)
    assert [*store.conversations] == names[2:]
    store.close()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {*names}


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_killed_server_has_every_finished_turn(tiny_folder: Path, tmp_path: Path, kills: int) -> None:
    with Server(tmp_path, "-m", str(tiny_folder), "--window", "64", "--dtype", "float32") as killed:
        talks = kill_under_load(killed, 4, kills, tokens=40, seconds=(0.3, 0.5))
    assert [line for talk in talks for line in talk.lost] == []
    assert sum(talk.interrupted for talk in talks) > 0
    assert min(talk.turns for talk in talks) > kills
