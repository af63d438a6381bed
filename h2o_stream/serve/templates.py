"""The chat templates of conversations, with the tokens of their openings: system prompts and tools may be long."""

from __future__ import annotations

from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.turn_tokens import end_tokens
from h2o_stream.serve.aside import LONG
from h2o_stream.serve.requests import Options
from h2o_stream.serve.schemas import size_of
from h2o_stream.session.template import ChatTemplate

_KEPT, _KEPT_TOKENS = 64, 2**20
"""How many templates of long openings are kept, and their tokens together, unless it is one alone."""


class Templates:
    """Makes templates, and keeps those that take long. Any thread may use it.

    Args:
        model: its model is one of `ManyStreams`.

    Attributes:
        end_tokens: tokens that end a reply.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model, self.end_tokens = model, end_tokens(model.model.generation, model.tokenizer)
        self._kept = dict[str, ChatTemplate]()

    def make(self, options: Options, system: str | None) -> ChatTemplate:
        """The template of conversations with these options and this system prompt, None for the model's."""
        system = self._model.system if system is None else system
        return ChatTemplate(
            self._model.tokenizer, system, self.end_tokens, options.thinking, options.tools, options.effort
        )

    def get(self, first: str, options: Options, system: str | None) -> ChatTemplate:
        """The same with the tokens of its opening; `first` is the hash of conversations without turns."""
        if template := self._kept.pop(first, None):
            self._kept[first] = template  # used last
            return template
        template = self.make(options, system)
        if self.takes_long(first, options, system) and template.opening_size:
            self._kept[first] = template
            kept = [*self._kept.items()]
            for number, (oldest, _) in enumerate(kept[:-1]):
                if len(kept) - number <= _KEPT and sum(x.opening_size for _, x in kept[number:]) <= _KEPT_TOKENS:
                    break
                self._kept.pop(oldest, None)
        return template

    def takes_long(self, first: str, options: Options, system: str | None) -> bool:
        """Whether many characters have to be made tokens of."""
        return first not in self._kept and size_of([system, *options.tools], LONG) >= LONG
