"""The chat with a running server: it loads no model, so several terminals share one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from prompt_toolkit.formatted_text import FormattedText
from rich.text import Text

from h2o_stream.base.logs import Log
from h2o_stream.base.resources import replace_surrogates
from h2o_stream.base.texts import piped_lines
from h2o_stream.config import ChatConfig, SamplingConfig
from h2o_stream.errors import DataError, H2OStreamError
from h2o_stream.session.automatic import automatic_session
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.run_record import run_record
from h2o_stream.session.server import Server
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header
from h2o_stream.ui.command_list import is_command
from h2o_stream.ui.files import find_files, read_all
from h2o_stream.ui.message_prompt import MessagePrompt, input_history
from h2o_stream.ui.reply import MarkdownReply, PlainReply, Reply, Thinking
from h2o_stream.ui.sessions import NOT_KEPT, show_resumed
from h2o_stream.ui.settings import parse_setting
from h2o_stream.ui.shared_commands import SharedCommands
from h2o_stream.ui.terminal import Terminal


class ServerChat(SharedCommands):
    """Chats with a server, as `Chat` does with a model. A context manager.

    Args:
        server: and what is sent to it with every message: sampling, and fields of our own server.
        system: the system prompt; None leaves it to the server.
    """

    def __init__(
        self,
        server: Server,
        options: Mapping[str, Any],
        system: str | None,
        config: ChatConfig,
        terminal: Terminal,
        jsonl: JsonlWriter,
    ) -> None:
        super().__init__(terminal)
        self._server, self._options, self._instructions = server, dict(options), system
        self._config, self._jsonl = config, jsonl
        self._entries = Log[Entry]()
        self._session: Session | None = None
        self._automatic = terminal.interactive and config.prompt is None and config.history
        self._draft, self._edited = "", 0
        self._previous: str | None = None  # the server's id of the last answer
        self._status = server.model
        self._leaving = False

    def __enter__(self) -> ServerChat:
        self._jsonl.write(run_record("h2o-chat", server=self._server.url, model=self._server.model, **self._options))
        if self._config.session is not None:
            self._open(Session(self._config.session))
        return self

    def __exit__(self, *exception: object) -> None:
        self._jsonl.write({"type": "summary", "turns": len(self._entries)})
        if self._session is not None:
            self._session.close()

    def _open(self, session: Session) -> None:
        self._session, self._entries = session, session.transcript.entries
        if session.transcript.header is not None:
            self._instructions = session.transcript.header.system
        if self._entries:
            show_resumed(self._terminal, session.name, self._entries)

    def run(self) -> bool:
        """Read messages and show the replies, until the end. Returns whether Ctrl-C ended it.

        Raises H2OStreamError if the only question got no answer.
        """
        config = self._config
        if config.prompt is not None:
            return self._say(f"{config.piped}\n\n{config.prompt}".strip())
        private = NOT_KEPT * (not config.history and self._session is None)
        title = f"{self._server.model} at {self._server.url}. {private}/help lists the commands, Ctrl-D leaves."
        self._terminal.note(title, style="dim")
        for text in self._typed() if self._terminal.interactive else piped_lines(sys.stdin.buffer, "standard input"):
            try:
                message = self.execute(text.strip()) or "" if is_command(text.strip()) else text.strip()
                interrupted = bool(message) and self._say(message.removeprefix("/") if message[:2] == "//" else message)
            except H2OStreamError as error:
                self._terminal.error(str(error))
                continue
            except KeyboardInterrupt:
                if not self._terminal.interactive:
                    raise
                self._terminal.error("stopped; the conversation goes on as before")
                continue
            if self._leaving or config.single_turn or (interrupted and not self._terminal.interactive):
                return interrupted
        return False

    def _typed(self) -> Iterator[str]:
        history = input_history(self._config.history, self._terminal.note)
        return MessagePrompt(self._toolbar, self._config.vim, history, self._starting_text).messages()

    def _toolbar(self) -> FormattedText:
        return FormattedText([("noreverse", self._status)])

    def _starting_text(self) -> str:
        draft, self._draft = self._draft, ""
        if not draft:
            self._edited = 0
        return draft

    def _say(self, message: str) -> bool:
        """One turn. Returns whether Ctrl-C ended it."""
        if self._edited:
            self._go_back(len(self._entries) - self._edited + 1)
            self._edited = 0
        message, text, thinking, finish = replace_surrogates(message), "", "", "interrupted"
        new = {"role": "user", "content": message}
        chunks = self._server.reply(lambda: [*self._messages(), new], [new], self._previous, self._options)
        self._previous = None
        last, broken, stopped = dict[str, Any](), None, False
        times = [time.perf_counter()]
        try:
            with closing(chunks), self._terminal.unechoed(), self._reply() as reply:
                for chunk in chunks:
                    times[1:] = [times[1] if len(times) > 1 else time.perf_counter(), time.perf_counter()]
                    last |= {name: chunk[name] for name in ("id", "usage", "h2o") if chunk.get(name)}
                    for choice in chunk["choices"]:
                        delta = choice["delta"]
                        if thought := delta["reasoning_content"]:
                            reply.think(thought)
                            thinking += thought
                        reply.push(delta["content"])
                        text += delta["content"]
                        finish = choice["finish_reason"] or finish
        except KeyboardInterrupt:
            finish, stopped = "interrupted", True
        except DataError as error:
            if not (text or thinking):
                raise
            finish, broken = "interrupted", error
        turn = self._entries[-1].turn + 1 if self._entries else 1
        self._previous = last.get("id") if "h2o" in last else None
        entry = Entry(turn, message, text, "said", finish, thinking=thinking)
        self._keep(entry)
        self._jsonl.write(_record(entry, last, times))
        if broken is not None:
            raise broken
        self._note(last, finish)
        return stopped

    def _reply(self) -> Reply:
        thinking = Thinking("fold")
        if self._config.plain or not self._terminal.live or self._terminal.quiet:
            return PlainReply(self._terminal, thinking)
        return MarkdownReply(lambda width: Text(self._status[:width]), self._terminal.stdout_console, thinking)

    def _messages(self) -> Iterator[dict[str, str]]:
        if self._instructions:
            yield {"role": "system", "content": self._instructions}
        for entry in self._entries:
            yield {"role": "user", "content": entry.prompt}
            if entry.text:
                yield {"role": "assistant", "content": entry.text}

    def _note(self, last: Mapping[str, Any], finish: str) -> None:
        """What the turn took, and the state of the cache, as far as the server tells."""
        usage, slots = last.get("usage", {}), last.get("h2o", {}).get("slots", {})
        parts = []
        if usage:
            parts.append(f"{usage.get('prompt_tokens', 0):,} + {usage.get('completion_tokens', 0):,} tokens")
        if slots:
            parts.append(f"kept {slots['cached']:,} of {slots['window']:,}, evicted {slots['evicted']:,}")
            self._status = f"{self._server.model} · seen {slots['seen']:,} evicted {slots['evicted']:,}"
        self._terminal.note(", ".join([*parts, finish]), style="dim")

    # keeping

    def _header(self) -> Header:
        return Header(self._server.model, "server", 0, self._instructions)

    def _keep(self, entry: Entry) -> None:
        self._entries = self._entries.append(entry)
        try:
            if self._session is None and self._automatic:
                session = automatic_session(self._entries[0].prompt)
                session.add_all(self._header(), self._entries, lambda turn: None)
                self._session = session
            elif self._session is not None:
                self._session.add(entry, None, self._header())
        except DataError as error:
            self._automatic = False
            self._terminal.error(f"this chat is not kept: {error}")

    def _go_back(self, count: int) -> None:
        if not 1 <= count <= len(self._entries):
            raise H2OStreamError(f"cannot undo {count} turns, there are {len(self._entries)}")
        kept = self._entries.first(len(self._entries) - count)
        if self._session is not None:
            self._session.undo(kept[-1].turn if kept else 0)
        self._entries, self._previous = kept, None

    # commands

    @property
    def _turns(self) -> Sequence[Entry]:
        return self._entries

    def _start_over(self, system: str | None) -> None:
        system = self._instructions if system is None else system
        if self._session is not None and self._session.automatic:
            self._session.close()
            self._session = None
        elif self._session is not None:
            self._session.begin(replace(self._header(), system=system))
        self._entries, self._instructions, self._previous = Log(), system, None

    def _take_up(self, entry: Entry) -> None:
        self._draft, self._edited = entry.prompt, self._entries.index(entry) + 1

    def _show(self, argument: str) -> None:
        self._terminal.note(str(self._options))

    def _regen(self, argument: str) -> str:
        prompt = self._existing_turns()[-1].prompt
        self._go_back(1)
        return prompt

    def _set(self, argument: str) -> None:
        name, value = parse_setting(argument)
        SamplingConfig(**{name: value})  # refuses what is out of range
        self._options[name], self._previous = value, None
        self._terminal.note(f"{name} is now {value}")

    def _file(self, argument: str) -> str:
        files, question = find_files(argument)
        texts = [f"{name}:\n\n{text}" for name, text in read_all(files, self._terminal.note)]
        return "\n\n".join([*texts, question]).strip()

    def _exit(self, argument: str) -> None:
        self._leaving = True


def _record(entry: Entry, last: Mapping[str, Any], times: Sequence[float]) -> dict[str, Any]:
    """A turn as a ``--jsonl`` record, as far as the server tells. Until its first chunk it reads the message.

    `last` is what its last chunks had; `times`, when it was asked for, and of the first and of the last chunk.
    """
    usage, slots = last.get("usage", {}), last.get("h2o", {}).get("slots", {})
    known = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    names = {"window": "window", "seen": "seen_tokens", "cached": "cached_tokens", "evicted": "evicted_tokens"}
    return {
        "type": "turn",
        "turn": entry.turn,
        "prompt_tokens": usage["prompt_tokens"] - known if "prompt_tokens" in usage else None,
        "new_tokens": usage.get("completion_tokens"),
        "prefill_s": round(times[1] - times[0], 4) if len(times) > 1 else None,
        "decode_s": round(times[2] - times[1], 4) if len(times) > 1 else None,
        **{name: slots.get(key) for key, name in names.items()},
        "cache_bytes": slots.get("nbytes"),
        "text": entry.text,
        **({"thinking": entry.thinking} if entry.thinking else {}),
        "finish": entry.finish,
    }
