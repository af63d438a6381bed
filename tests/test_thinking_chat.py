"""Thinking in conversations and in the chat: what is kept of it, written, drawn, opened and left out."""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pyte
import pytest
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from h2o_stream.cache.state import checksummed, decode_json, encode_json
from h2o_stream.config import CacheConfig, SamplingConfig, ThinkMode
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Token
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.folders import find_transcript
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.retention import retention
from h2o_stream.session.transcript import Header
from h2o_stream.session.turn import Turn
from h2o_stream.ui.reply import MarkdownReply, Thinking
from h2o_stream.ui.screen import Screen
from h2o_stream.ui.terminal import SafeConsole, Terminal
from tests.commands import invoke, piped, records
from tests.fixtures import make_llama
from tests.thinking_model import OPENED, script, thinking_tokenizer, write_thinking_model

pytestmark = pytest.mark.usefixtures("own_home")

THOUGHT = "First the code.\nThen the cellar."
REPLY = f"<think>\n{THOUGHT}\n</think>\n\nIt is 4711."
LINE = r"thought for \d+ tokens, /think shows it"


@pytest.fixture(scope="module")
def thinking(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    return thinking_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, thinking: PreTrainedTokenizerBase) -> Path:
    return write_thinking_model(tmp_path_factory.mktemp("thinking"), thinking)


def talk(tokenizer: PreTrainedTokenizerBase, window: int = 64, max_tokens: int = 200) -> ConversationHistory:
    model = make_llama(vocab=len(tokenizer), context=2000)
    engine = Engine(model, tokenizer, CacheConfig(window=window), SamplingConfig(max_tokens=max_tokens))
    return ConversationHistory(Conversation(engine), Header("tiny", "h2o", window, None))


def say(history: ConversationHistory, text: str) -> tuple[Turn, list[Token]]:
    *events, turn = history.say(text)
    return turn, [event for event in events if isinstance(event, Token)]


@pytest.fixture
def history(thinking: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> ConversationHistory:
    """A conversation in which the model always replies with `REPLY`."""
    script(monkeypatch, thinking, REPLY)
    return talk(thinking)


class TestConversation:
    @pytest.mark.parametrize("special", [False, True])
    @pytest.mark.parametrize("opened", [False, True])
    def test_thinking_is_no_part_of_the_reply(
        self, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, special: bool, opened: bool
    ) -> None:
        thinking = thinking_tokenizer(tokenizer, *([OPENED] if opened else []), special=special)
        script(monkeypatch, thinking, REPLY.removeprefix("<think>\n") if opened else REPLY)
        history = talk(thinking)
        turn, tokens = say(history, "What is it?")
        assert (turn.text, turn.thinking) == ("It is 4711.", THOUGHT)
        assert "".join(token.text for token in tokens) == turn.text
        assert "".join(token.thinking or "" for token in tokens) == turn.thinking
        assert turn.thinking_tokens == sum(token.thinking is not None for token in tokens)
        [thought] = history.conversation.thoughts
        stream = history.conversation.engine.tokens[thought.start : thought.stop]
        assert thinking.decode(stream) == f"<think>\n{THOUGHT}\n</think>"

    def test_it_is_evicted_first(self, thinking: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
        script(monkeypatch, thinking, REPLY, "Yes. " * 12)
        history = talk(thinking)
        conversation, engine = history.conversation, history.conversation.engine
        say(history, "What is it?")
        [thought] = conversation.thoughts
        assert engine.cache.transient == (thought,)
        assert conversation.recalled == ()
        say(history, "Sure? " * 8)
        first, second = retention(engine, conversation.turn_spans, thoughts=conversation.thoughts)
        assert first.thinking < 0.2
        assert first.share > 0.4
        assert second.thinking is None

    def test_states_of_older_versions_have_no_thoughts(self, history: ConversationHistory) -> None:
        say(history, "One?")
        state = history.conversation.state_dict()
        spans = [(1, 0, len(history.conversation.engine.tokens))]
        values = decode_json(state, "conversation") | {"passages": spans}
        older = checksummed({"conversation": encode_json(values)}, "conversation.checksums")
        assert history.conversation.thoughts
        history.conversation.load_state_dict({**state, **older})
        assert history.conversation.thoughts == ()
        assert [(span.turn, span.start, span.stop) for span in history.conversation.turn_spans] == spans
        assert say(history, "Two?")[0].text == "It is 4711."

    def test_going_back_and_resuming(self, thinking: Any, history: ConversationHistory) -> None:
        history.fork("deep")
        say(history, "One?")
        [first] = history.conversation.thoughts
        say(history, "Two?")
        assert len(history.conversation.thoughts) == 2
        history.undo()
        assert history.conversation.thoughts == history.conversation.engine.cache.transient == (first,)
        history.close()
        resumed = talk(thinking)
        resumed.open("deep")
        assert resumed.conversation.thoughts == resumed.conversation.engine.cache.transient == (first,)
        assert [entry.thinking for entry in resumed.entries] == [THOUGHT]
        list(resumed.feed_turn("Three?", "Yes."))
        assert [entry.thinking for entry in resumed.entries] == [THOUGHT, ""]
        resumed.close()

    def test_a_transcript_is_fed_again_without_it(self, thinking: Any, history: ConversationHistory) -> None:
        history.fork("old")
        say(history, "One?")
        history.close()
        other = talk(thinking, window=80)
        list(other.replay("old"))
        assert [entry.thinking for entry in other.entries] == [THOUGHT]
        assert other.conversation.thoughts == ()
        assert "4711" in thinking.decode(list(other.conversation.engine.tokens))
        assert "cellar" not in thinking.decode(list(other.conversation.engine.tokens))
        other.close()

    def test_it_is_cut_off(self, thinking: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
        script(monkeypatch, thinking, REPLY)
        history = talk(thinking, max_tokens=6)
        turn, _ = say(history, "One?")
        assert (turn.text, turn.finish) == ("", "length")
        assert THOUGHT.startswith(turn.thinking)
        [thought] = history.conversation.thoughts
        assert (len(thought), thought.stop) == (6, len(history.conversation.engine.tokens))

    def test_it_is_stopped(self, history: ConversationHistory) -> None:
        events = history.say("One?")
        for event in events:
            if isinstance(event, Token) and event.thinking == " code":
                break
        events.close()
        [entry] = history.entries
        assert (entry.thinking, entry.text, entry.finish) == ("First the code", "", "interrupted")
        assert history.conversation.thoughts == history.conversation.engine.cache.transient

    def test_a_past_reply_ends_thinking_that_the_prompt_begins(self, tokenizer: PreTrainedTokenizerBase) -> None:
        thinking = thinking_tokenizer(tokenizer, OPENED)
        history = talk(thinking)
        list(history.feed_turn("One?", "Two."))
        fed = thinking.decode(list(history.conversation.engine.tokens))
        assert fed.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nTwo.<|im_end|>")

    def test_switched_off(self, thinking: PreTrainedTokenizerBase) -> None:
        history = talk(thinking, max_tokens=1)
        say(history, "One? <think>")
        history.conversation.switch_thinking(False)
        say(history, "Two?")
        history.conversation.switch_thinking(True)
        say(history, "Three?")
        fed = thinking.decode(list(history.conversation.engine.tokens))
        assert re.findall(r"(\w+\?).*?assistant\n(<think>\n\n</think>)?", fed, re.DOTALL) == [
            ("One?", ""),
            ("Two?", "<think>\n\n</think>"),
            ("Three?", ""),
        ]


class TestCommands:
    def test_a_pipe_gets_the_answer(self, folder: Path, thinking: Any, monkeypatch: Any, tmp_path: Path) -> None:
        script(monkeypatch, thinking, REPLY, "Yes.", REPLY)
        out = tmp_path / "run.jsonl"
        lines = ["/think", "What?", "Sure?", "/think", "/think 1", "/think 7", "/think purple", "/why"]
        done = piped(folder, [*lines, "/think hide", "Why?"], "-n", 100, "--jsonl", out)
        assert done.stdout == "It is 4711.\nYes.\nIt is 4711.\n"
        assert len(re.findall(rf"^{LINE}$", done.stderr, re.M)) == 1
        for words in (
            "nothing was said yet",
            "turn 2 has no thinking",
            f"\n{THOUGHT}\n",
            "there is no turn 7 in the transcript",
            "/think takes show, fold, hide, on, off or the number of a turn, not 'purple'",
            "thinking is now hidden",
        ):
            assert done.stderr.count(words) == 1, words
        assert re.search(r"^turn 1 · \d+% kept, \d+% of its thinking$", done.stderr, re.M)
        assert re.search(r"^turn 2 · \d+% kept$", done.stderr, re.M)
        first, second, _ = (record for record in records(out.read_text()) if record["type"] == "turn")
        assert (first["text"], first["thinking"]) == ("It is 4711.", THOUGHT)
        assert first["thinking_tokens"] > 8
        assert not {"thinking", "thinking_tokens"} & set(second)

    def test_all_of_it(self, folder: Path, thinking: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        script(monkeypatch, thinking, REPLY, "Yes.")
        shown, json_file = tmp_path / "shown.md", tmp_path / "shown.json"
        lines = ["What?", "Sure?", f"/export {shown}", f"/export {json_file}", "/think fold"]
        done = piped(
            folder, [*lines, f"/export {tmp_path}/plain.md"], "-n", 100, "--think", "show", "--session", "talk"
        )
        assert done.stdout == f"<think>\n{THOUGHT}\n</think>\n\nIt is 4711.\nYes.\n"
        quoted = "> First the code.\n> Then the cellar.\n"
        assert f"**Model** (thinking)\n\n{quoted}\n**Model**\n\nIt is 4711.\n" in shown.read_text()
        messages = json.loads(json_file.read_text())["messages"]
        assert messages[1] == {"role": "assistant", "content": "It is 4711.", "reasoning_content": THOUGHT}
        assert messages[3] == {"role": "assistant", "content": "Yes."}
        assert "cellar" not in (tmp_path / "plain.md").read_text()
        for mode in ("show", "fold"):
            out = tmp_path / f"{mode}.md"
            assert invoke("h2o-chat", "--session", "talk", "--export", out, "--think", mode).exit_code == 0
            assert ("cellar" in out.read_text()) == (mode == "show")
        first, second = map(json.loads, find_transcript("talk").path.read_text().splitlines()[1:])
        assert first["thinking"] == THOUGHT
        assert "thinking" not in second
        assert THOUGHT in piped(folder, ["/think 1"], "--session", "talk").stderr

    def test_one_question(self, folder: Path, thinking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        script(monkeypatch, thinking, REPLY)
        done = invoke("h2o-chat", "-m", folder, "-p", "What?", "-n", 100)
        assert done.stdout == "It is 4711.\n"
        assert re.search(r"^thought for \d+ tokens$", done.stderr, re.M), "there is no /think"
        assert not invoke("h2o-chat", "-m", folder, "-p", "What?", "-n", 100, "-q").stderr

    def test_no_control_codes(self, folder: Path, thinking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        script(monkeypatch, thinking, "<think>\x1b[31mred\x07</think>\x1b[2Jclear")
        done = piped(folder, ["What?", "/think"], "-n", 100, "--think", "show")
        assert done.stdout == "<think>\n[31mred\n</think>\n\n[2Jclear\n"
        assert "\n[31mred\n" in done.stderr
        assert "\x1b" not in done.stderr

    def test_the_switch(self, folder: Path, tiny_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
        done = piped(folder, ["/think off", "/think on"], "--think", "off")
        assert "thinking is off from the next message on\nthinking is on from the next message on\n" in done.stderr
        assert "no switch" not in done.stderr
        done = piped(tiny_folder, ["/think off"], "--think", "off")
        assert done.stderr.count("the model's chat template has no switch for thinking") == 1
        always = write_thinking_model(tmp_path / "always", thinking_tokenizer(tokenizer, OPENED))
        done = piped(always, ["/exit"], "--think", "off")
        assert "the model's chat template has no switch for thinking; it is folded" in done.stderr

    def test_a_run(self, folder: Path, thinking: Any, monkeypatch: Any, questions: Path, tmp_path: Path) -> None:
        script(monkeypatch, thinking, REPLY)
        command = ("h2o-stream", "-m", folder, "--questions", questions, "--turns", 1, "-n", 100)
        recording = tmp_path / "run.rec"
        assert invoke(*command, "--record", recording).stdout == "It is 4711.\n"
        assert invoke(*command, "--think", "show").stdout == f"<think>\n{THOUGHT}\n</think>\n\nIt is 4711.\n"
        replayed = invoke("h2o-stream", "--replay", recording, "--pace", 1000)
        assert re.search(r"^thought for \d+ tokens\r?\nIt is 4711\.\r?$", replayed.stdout, re.M)


def token(text: str, thinking: str | None = None) -> Token:
    return Token(5, text, 0.1, 9, lambda: pytest.fail("not needed"), thinking)


EVENTS = (
    *(token("", piece) for piece in ("", "First the", " code.\nThen", " the cel", "lar.")),
    token(""),
    *map(token, ("It is **47", "11**.")),
)


class Drawn:
    """A reply on an emulated terminal: what is shown after each event and in the end, and all that was written."""

    def __init__(self, mode: ThinkMode, events: Sequence[Token] = EVENTS) -> None:
        self.screen = pyte.Screen(40, 10)
        self.stream, self.out = pyte.Stream(self.screen), io.StringIO()
        console = Console(file=self.out, force_terminal=True, width=40, height=10, highlight=False)
        self.frames, self.written = list[str](), ""
        with MarkdownReply(lambda width: Text("FOOTER"), console, Thinking(mode, ", /think shows it")) as reply:
            for event in events:
                reply.add_token(event)
                reply._live.refresh()
                self.frames.append(self.lines())
        self.last = self.lines()

    def lines(self) -> str:
        self.written += self.out.getvalue()
        self.stream.feed(self.out.getvalue().replace("\n", "\r\n"))
        self.out.seek(0)
        self.out.truncate()
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()


class TestDrawing:
    def test_folded(self) -> None:
        drawn = Drawn("fold")
        assert drawn.frames[0] == "thinking … 1 token\nFOOTER"
        assert drawn.frames[4] == drawn.frames[5] == "thinking … 5 tokens\nFOOTER"
        assert drawn.frames[6] == "thought for 5 tokens, /think shows it\nIt is 47\nFOOTER"
        assert drawn.last == "thought for 5 tokens, /think shows it\nIt is 4711."

    def test_shown(self) -> None:
        drawn = Drawn("show")
        assert drawn.frames[1] == "First the\nFOOTER"
        assert drawn.frames[3] == "First the code.\nThen the cel\nFOOTER"
        assert drawn.last == "First the code.\nThen the cellar.\n\nIt is 4711."

    def test_hidden(self) -> None:
        drawn = Drawn("hide")
        assert drawn.frames[:6] == ["FOOTER"] * 6
        assert drawn.last == "It is 4711."

    def test_dim(self) -> None:
        assert "\x1b[2mThen the cellar.\x1b[0m" in Drawn("show").written

    @pytest.mark.parametrize("mode", get_args(ThinkMode))
    def test_an_empty_thought_leaves_no_line(self, mode: ThinkMode) -> None:
        assert Drawn(mode, [token("", ""), token("", ""), token("Yes.")]).last == "Yes."

    def test_cut_off(self) -> None:
        assert Drawn("fold", EVENTS[:3]).last == "thought for 3 tokens, /think shows it"

    @pytest.mark.parametrize(
        ("mode", "shown"),
        [("show", "First the code.\n\nThen the cellar.\n\nIt is"), ("fold", "thought for 5 tokens"), ("hide", "It is")],
    )
    def test_on_the_screen(self, mode: ThinkMode, shown: str) -> None:
        out, terminal = io.StringIO(), Terminal()
        terminal.console = SafeConsole(file=out, force_terminal=True, width=60, height=20, markup=False)
        with Screen(terminal, "model", None, mode) as screen:
            screen.start_turn("turn 1", "What?")
            for event in EVENTS:
                screen._write_reply(event)
            text = "\n".join(line.text.plain for line in screen._transcript)
        for words in shown.split("\n\n"):
            assert words in text
        assert ("cellar" in text) == (mode == "show")
        assert ("thought" in text) == (mode == "fold")
