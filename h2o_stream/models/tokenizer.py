"""Tokenizers read from files without transformers, with the part of its interface that this package uses."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from tokenizers import AddedToken, Tokenizer

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.token_texts import tokenizer_errors, without_panics
from h2o_stream.errors import ModelNotFoundError
from h2o_stream.models.rendering import render

_UNKNOWN = "\ue000 \U000f0000"
"""A text that no vocabulary has: some tokenizers fail at it, whenever it comes."""


ASIDE = threading.local()
"""In a thread that sets `encode`, this gives the tokens of a text, or None: see `serve.long_texts`."""


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """The tokens of a text. Other threads go on meanwhile, which they do not with the library's own `encode`.

    Raises:
        H2OStreamError: the vocabulary has none for it.
    """
    with tokenizer_errors("the model's tokenizer cannot read this"):
        aside = getattr(ASIDE, "encode", None)
        tokens: list[int] | None = aside(tokenizer, text, add_special_tokens) if aside else None
        if tokens is None:
            tokens = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return tokens


class FileTokenizer:
    """A tokenizer of the tokenizers library with a chat template. Methods and attributes are those of transformers.

    Special tokens that the tokenizer does not have are added to it.

    Attributes:
        backend_tokenizer: encodes and decodes.
        special_tokens_map: contents of special tokens by name, such as ``eos_token``; templates have them as variables.
        extra_special_tokens: contents of special tokens without a name.
        chat_template: a template, templates by name, or None.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | Mapping[str, str] | None,
        extra_special_tokens: Sequence[str] = (),
    ) -> None:
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.extra_special_tokens = list(extra_special_tokens)
        self.chat_template = chat_template
        backend.no_truncation()
        backend.no_padding()
        self.add_special_tokens({})

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read a tokenizer that transformers has saved: ``tokenizer.json`` with its config and chat templates.

        Raises ModelNotFoundError if a file is missing or damaged.
        """
        with tokenizer_errors(f"the tokenizer in {folder} cannot be read", ModelNotFoundError), without_panics():
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _read_config(folder)
            _add_tokens(backend, config.get("added_tokens_decoder", {}))
            named = {name: _content(value) for name, value in config.items() if _is_named(name, value)}
            backend.decode(backend.encode(_UNKNOWN).ids)
            extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
            if isinstance(extra, Mapping):
                named, extra = named | {name: _content(value) for name, value in extra.items()}, []
            return cls(backend, named, _read_templates(folder, config), list(map(_content, extra)))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence."""
        return self._id_of("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills up shorter rows of a batch."""
        return self._id_of("pad_token")

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens, with and without names."""
        ids = map(self.backend_tokenizer.token_to_id, dict.fromkeys(self._special_tokens))
        return [number for number in ids if number is not None]

    def add_special_tokens(self, special_tokens: Mapping[str, str]) -> None:
        """Name special tokens."""
        self.special_tokens_map |= special_tokens
        known = {token.content for token in self.backend_tokenizer.get_added_tokens_decoder().values()}
        missing = dict.fromkeys(token for token in self._special_tokens if token not in known)
        self.backend_tokenizer.add_tokens([AddedToken(token, special=True) for token in missing])

    def __len__(self) -> int:
        """Size of the vocabulary with added tokens."""
        return self.backend_tokenizer.get_vocab_size()

    def __bool__(self) -> bool:
        return True

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Encode a text. ``input_ids`` are its tokens."""
        return {"input_ids": encode(self.backend_tokenizer, text, add_special_tokens)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of tokens; raises H2OStreamError if the decoder fails."""
        with tokenizer_errors("the model's tokenizer cannot write these tokens"):
            return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """The entries of the vocabulary, None for ids that it does not have."""
        return list(map(self.backend_tokenizer.id_to_token, ids))

    def get_chat_template(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat template, the one for tools if there are several; raises ValueError if there is none."""
        template = self.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
        if template is None:
            raise ValueError("the tokenizer has no chat template")
        return template

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text that the chat template makes of a conversation. Tools are JSON schemas.

        Raises:
            TemplateError: the template is invalid, or rejects the conversation.
            ValueError: there is no template.
        """
        values = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, **variables}
        return render(self.get_chat_template(tools), conversation, **{**self.special_tokens_map, **values})

    @property
    def _special_tokens(self) -> list[str]:
        return [*self.special_tokens_map.values(), *self.extra_special_tokens]

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def _read_config(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``; without added tokens, it is an old one with special tokens in a file of their own."""
    config = read_object(folder / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | read_object(folder / "special_tokens_map.json")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file.

    Raises ModelNotFoundError if it cannot be read, or is something else than an object.
    """
    try:
        values = parse_json(_read_text(path)) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelNotFoundError(f"{path} cannot be read: it is no JSON object")
    return values


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _read_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Chat templates, which come from files of their own if there are any."""
    templates = {path.stem: _read_text(path) for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (path := folder / "chat_template.jinja").exists():
        templates["default"] = _read_text(path)
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    template: str | list[dict[str, str]] | None = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def _add_tokens(backend: Tokenizer, tokens: Mapping[str, Mapping[str, Any]]) -> None:
    """Add tokens, by id, that the tokenizer does not have or has otherwise."""
    texts = set(map(repr, backend.get_added_tokens_decoder().values()))
    added = (AddedToken(**tokens[number]) for number in sorted(tokens, key=int))
    backend.add_tokens([token for token in added if repr(token) not in texts])


def _is_named(name: str, value: Any) -> bool:
    return name.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))


def _content(token: str | Mapping[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]
