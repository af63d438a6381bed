"""How replies begin: their conversations are opened, in other threads if that takes long. Used by the worker's thread.

Others go on meanwhile. Requests for a conversation that is being loaded wait for that, and keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from h2o_stream.serve.aside import Threads
from h2o_stream.serve.conversations import Conversations
from h2o_stream.serve.live import Loading, Opened
from h2o_stream.serve.replies import Ask


class Openings:
    """Opens conversations.

    Args:
        asked: requests that wait; those whose conversation was loaded are the first of them.
        conversations: the server's conversations.
        call: does something in the worker's thread.

    Attributes:
        loading: requests that wait for a conversation that is being loaded, by its id.
        loaded: what was loaded for requests that wait.
    """

    def __init__(
        self,
        asked: deque[Ask],
        conversations: Conversations,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self._asked, self._conversations, self._call = asked, conversations, call
        self._threads = Threads("h2o-load")
        self.loading, self.loaded = dict[str, list[Ask]](), dict[Ask, Loading]()

    @property
    def num_waiting(self) -> int:
        """How many requests wait for what is being loaded; any thread may ask."""
        return sum(map(len, [*self.loading.values()]))

    def open(self, ask: Ask) -> Opened | None:
        """The conversation for a request; None if it waits for one that is loaded in another thread."""
        conversations, loading = self._conversations, self.loaded.pop(ask, None)
        if ask.raw:
            return conversations.open_raw(ask.options)
        while True:
            if loading is None:
                if (place := conversations.find(ask)) is None:
                    return conversations.open(ask)
                if place.kept.id in self.loading:
                    self.loading[place.kept.id].append(ask)
                    return None
                if opened := conversations.open_awake(ask, place):
                    return opened
                loading = conversations.begin_loading(ask, place)
                if conversations.takes_long(loading):
                    self._load(ask, loading)
                    return None
                conversations.load(loading)
            if opened := conversations.open_loaded(ask, loading):
                return opened
            loading = None

    def _load(self, ask: Ask, loading: Loading) -> None:
        """Load a conversation in another thread. Other requests for it wait, too."""
        name = loading.place.kept.id
        self.loading[name] = [ask]

        def go_on() -> None:
            asks = self.loading.pop(name)
            self.loaded[ask] = loading
            if ask not in asks:  # its client has left
                self.cancel(ask)
            self._asked.extendleft(reversed(asks))

        self._threads.submit(partial(self._conversations.load, loading), partial(self._call, go_on))

    def cancel(self, ask: Ask) -> None:
        """Forget what was loaded for a request."""
        if loading := self.loaded.pop(ask, None):
            self._conversations.end_loading(loading)
