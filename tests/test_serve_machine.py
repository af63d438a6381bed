"""Any sequence of requests of two clients: each goes on from what it said itself, and from nothing else; and what is
cached answers as a new conversation does that was led there in the same way.

Longer: ``pytest tests/test_serve_machine.py --hypothesis-profile long`` until it is interrupted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, rule, run_state_machine_as_test

from h2o_stream.config import CacheConfig, ModelConfig
from tests.native_builds import needs_library
from tests.protocol import answered, message_of
from tests.served import Running

pytestmark = needs_library

UNUSED = count(2)
"""Names of owners that nobody has had, and of what is said first."""

TEXTS = st.sampled_from(["Hi.", "Name a river.", "<|im_end|>", "日本語 é", "a" * 90, " x\n"])
REPLY = st.fixed_dictionaries({
    "max_tokens": st.sampled_from([1, 3, 9]), "stop": st.sampled_from([None, "e", ["a", " "]]),
    "stream": st.booleans(), "n": st.sampled_from([1, 2]), "store": st.sampled_from([True, True, False]),
})  # fmt: skip
KEPT = st.fixed_dictionaries({"recall": st.sampled_from(["off", "auto"]), "window": st.sampled_from([48, 64])})
OWNERS = st.sampled_from([0, 1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, long_folder: Path) -> Iterator[Running]:
    model, folder = ModelConfig(str(long_folder), dtype="float32"), tmp_path_factory.mktemp("served")
    with (
        Running(folder, model, CacheConfig(window=64), awake=3, running=3) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        running.service.access.owner = lambda headers: headers["authorization"]  # any key is one
        patch.setattr("h2o_stream.serve.conversations._MANY", 2)  # longer ones are woken up in another thread
        yield running


@dataclass(frozen=True)
class Said:
    """An answer: whose it is, what was said up to it, how, and the requests that led there from the start."""

    owner: int
    id: str
    history: tuple[tuple[str, str], ...]
    kept: dict[str, Any]
    requests: tuple[dict[str, Any], ...]
    stored: bool

    def begins(self, owner: int, history: Any, kept: Any) -> bool:
        """Whether an owner may go on from it with this history."""
        return self.stored and (self.owner, self.kept, _stripped(self.history)) == (owner, kept, _stripped(history))


def _stripped(history: Any) -> list[tuple[str, str]]:
    return [(prompt, reply.strip()) for prompt, reply in history]


def messages(history: Any, text: str) -> list[dict[str, str]]:
    """The messages of turns, and one more of the user."""
    said = [
        {"role": role, "content": x} for turn in history for role, x in zip(("user", "assistant"), turn, strict=True)
    ]
    return [*said, {"role": "user", "content": text}]


class Clients(RuleBasedStateMachine):
    said = Bundle("said")
    server: Running

    def __init__(self) -> None:
        super().__init__()
        self.salt, self.answers = next(UNUSED), list[Said]()

    @rule(target=said, owner=OWNERS, text=TEXTS, reply=REPLY, kept=KEPT)
    def begin(self, owner: int, text: str, reply: Any, kept: Any) -> Any:
        return self.ask(owner, (), f"{text} {self.salt}", reply, kept)

    @rule(target=said, before=said, owner=OWNERS, text=TEXTS, reply=REPLY)
    def go_on(self, before: Said, owner: int, text: str, reply: Any) -> Any:
        return self.ask(owner, before.history, f"{text} {len(before.history)}", reply, before.kept)

    @rule(target=said, before=said, owner=OWNERS, text=TEXTS, reply=REPLY)
    def go_on_by_id(self, before: Said, owner: int, text: str, reply: Any) -> Any:
        return self.ask(owner, before.history, f"{text} {len(before.history)}", reply, before.kept, before)

    @rule(target=said, before=said, owner=OWNERS, text=TEXTS, reply=REPLY, place=st.integers(0, 9), other=TEXTS)
    def edit(self, before: Said, owner: int, text: str, reply: Any, place: int, other: str) -> Any:
        turns = [list(turn) for turn in before.history]
        turns[place // 2 % len(turns)][place % 2] = f"{other} {self.salt}"
        return self.ask(owner, tuple(map(tuple, turns)), text, reply, before.kept)

    def ask(self, owner: int, history: Any, text: str, reply: Any, kept: Any, before: Said | None = None) -> Any:
        body = {"messages": messages(history, text), "temperature": 0, **reply, **kept}
        if before is not None:
            body |= {"messages": messages((), text), "previous_response_id": before.id}
        status, answer = answered(self.server, "chat/completions", body, f"key{owner}")
        if before is not None and not (before.stored and before.owner == owner):
            assert (status, answer[0]["code"]) == (404, "not_found")
            return before
        if status == 404:
            assert before is not None  # its state is not kept any more
            return before
        assert status == 200, answer
        message, report = message_of(answer, reply["stream"])
        turns = (*history, (text, message["content"]))
        self.check_transcript(owner, turns, report)
        chains = [()] if not report["turns_known"] else [
            each.requests for each in self.answers if each.begins(owner, history[: report["turns_known"]], kept)
        ]  # fmt: skip
        request = {"history": history, "text": text, "reply": reply, "kept": kept, "said": message["content"]}
        assert chains, "it goes on from what its client has not said"
        led = [chain for chain in chains if self.replays((*chain, request))]
        assert led, (report, body)
        found = Said(owner, answer[0]["id"], turns, kept, (*led[0], request), reply["store"])
        self.answers.append(found)
        return found

    def check_transcript(self, owner: int, turns: Any, report: Any) -> None:
        """What is on disk is what the client knows, and is its own."""
        if report["conversation"]:
            entries = self.server.entries(report["conversation"], report["turn"])
            assert _stripped((entry.prompt, entry.text) for entry in entries) == _stripped(turns)

    def replays(self, requests: Any) -> bool:
        """Whether a new client gets the same last reply by these requests."""
        key = f"key{next(UNUSED)}"
        for request in requests:
            body = {"messages": messages(request["history"], request["text"]), "temperature": 0, **request["kept"]}
            body |= {name: request["reply"][name] for name in ("max_tokens", "stop")}
            status, answer = answered(self.server, "chat/completions", body, key)
            assert status == 200, answer
        return bool(message_of(answer, False)[0]["content"] == requests[-1]["said"])


def test_clients(server: Running) -> None:
    machine = type("Machine", (Clients,), {"server": server})
    examples = max(settings.default.max_examples // 20, 1)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=6))
