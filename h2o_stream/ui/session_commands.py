"""The chat's commands about sessions: what is said is kept, found and continued."""

from __future__ import annotations

from h2o_stream.base.resources import user_path
from h2o_stream.session.folders import read_settings, remove_session, write_settings
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.transcript import export
from h2o_stream.ui.chat_context import ChatContext
from h2o_stream.ui.sessions import show_matches, show_sessions


class SessionCommands:
    """Commands about sessions; see `Commands`."""

    def __init__(self, context: ChatContext) -> None:
        self._context, self._terminal = context, context.terminal

    @property
    def _history(self) -> ConversationHistory:
        return self._context.history

    def _fork(self, argument: str) -> None:
        self._history.fork(argument)
        self._context.keep_options()
        self._terminal.note(f"the conversation continues as session {argument}")

    def _rename(self, argument: str) -> None:
        session = self._history.session
        self._history.fork(argument)
        self._context.keep_options()
        if session is not None:
            remove_session(session.name)
        self._terminal.note(f"this is session {argument} now")

    def _save(self, argument: str) -> None:
        self._history.save(argument)
        write_settings(argument, self._context.kept_options())
        self._terminal.note(f"saved as session {argument}")

    def _load(self, argument: str) -> None:
        self._context.open_session(argument)
        self._context.take_options(read_settings(argument))

    def _sessions(self, argument: str) -> None:
        show_sessions(self._terminal, self._terminal.console)

    def _search(self, argument: str) -> None:
        show_matches(self._terminal.console, argument)

    def _export(self, argument: str) -> None:
        path, thinking = user_path(argument, f"/export {argument}"), self._context.think == "show"
        export(path, self._history.header(), self._history.entries, thinking)
        self._terminal.note(f"written: {argument}")
