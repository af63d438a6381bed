"""Requests of the API, checked: what is to be answered, in which conversation, and how it is sampled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from h2o_stream.base.json_text import check_depth
from h2o_stream.config import POLICIES, CacheConfig, RecallConfig, RecallMode, SamplingConfig
from h2o_stream.errors import ConfigError
from h2o_stream.native.slots import POLICIES as NATIVE
from h2o_stream.serve.errors import wrong
from h2o_stream.serve.messages import Reply
from h2o_stream.serve.schemas import Schema, parse_schema
from h2o_stream.serve.thinking import parse_budget, parse_effort, parse_thinking
from h2o_stream.serve.wording import as_api_error, renamed
from h2o_stream.session.calls import CallFormat
from h2o_stream.session.messages import Tool

MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, MAX_STOP = 8, 20, 4, 1000

MAX_PINS = 100
"""Each of them is a turn, and the window grows with it."""

MAX_MESSAGE = 1000
"""Characters of what is said before thinking is ended: they are made tokens of while others wait."""

_NO_LIMIT, _FILL_CONTEXT, _ANY_SEED = -1, -2, -1
"""What clients of llama.cpp, vLLM and ollama send for no limit and for no seed."""

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that is a character in a pair only."""

_MAX_BIAS = 1e6
_BIASES = "an object or a list of pairs of token ids or texts, each with a number or false"

_KINDS = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}
"""What types are called in JSON."""

_PENALTIES = (
    "frequency_penalty", "presence_penalty", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How a conversation is kept, for all of its turns.

    Attributes:
        cache: windows and rules.
        recall: whether evicted passages are read again.
        thinking: whether the model thinks before it answers; None leaves it to the template.
        has_efforts: whether the template says how much.
        effort: how much; None leaves it to the template.
        pins: texts that are never evicted, fed before the first turn.
        tools: tools that the model may call, described before the first turn.
        calls: how the model writes calls; None without tools.
        owner: owner of the conversation, see `Access.owner`.
    """

    cache: CacheConfig
    recall: RecallMode = "off"
    thinking: bool | None = None
    has_efforts: bool = False
    effort: str | None = None
    pins: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    calls: CallFormat | None = None
    owner: str = ""

    def read(self, text: str) -> Reply:
        """A reply with its calls."""
        return Reply(*self.calls.parse(text)) if self.calls else Reply(text)

    @property
    def recall_config(self) -> RecallConfig:
        """The same for a conversation."""
        return RecallConfig(self.recall)

    @property
    def key(self) -> list[Any]:
        """What distinguishes conversations with other options, as JSON."""
        tools = [list(self.tools)] if self.tools else []
        effort = [{"effort": self.effort}] if self.effort else []
        return [self.cache.policy, self.cache.window, self.recall, self.thinking, list(self.pins), *tools, *effort]

    def parse(self, body: Mapping[str, Any], owner: str) -> Options:
        """The options of a request of this owner, with these as defaults.

        Raises:
            ApiError: one is wrong.
        """
        options = replace(self, owner=owner)
        try:
            if (policy := field(body, "policy", str)) is not None:
                if policy not in (served := served_policies()):
                    raise wrong("policy", policy, ", ".join(served))
                options = replace(options, cache=replace(options.cache, policy=policy))
            if (window := field(body, "window", int)) is not None:
                options = replace(options, cache=replace(options.cache, window=window, auto_window=0, cache_size=None))
            options.cache.plan()
        except ConfigError as error:
            raise as_api_error(error, "window") from error
        if (recall := field(body, "recall", str)) is not None:
            if recall not in get_args(RecallMode):
                raise wrong("recall", recall, " or ".join(get_args(RecallMode)))
            options = replace(options, recall=recall)
        effort = parse_effort(body) or options.effort
        effort = effort if self.has_efforts else None
        options = replace(options, thinking=parse_thinking(body, options.thinking), effort=effort)
        if (pins := field(body, "pins", list)) is not None:
            if len(pins) > MAX_PINS or not all(isinstance(pin, str) and pin.strip() for pin in pins):
                raise wrong("pins", pins, f"a list of at most {MAX_PINS} texts")
            options = replace(options, pins=tuple(pins))
        return options


@dataclass(frozen=True)
class Sampled:
    """How replies are sampled and sent.

    Attributes:
        config: sampling of one reply.
        choices: how many replies.
        stream: whether they are sent token by token.
        usage: whether a stream ends with the usage.
        logprobs: how many likely tokens are listed for each; None for none of them, 0 for the sampled one only.
        slots: whether a stream says after each token what is in the cache.
        schema: what the reply must be: a JSON schema, or a grammar (see `Grammar`); None for any text.
        rules: what it must be so that it calls tools, or follows the schema, in llguidance's form of Lark.
        forced: whether it must call tools.
        place: the field with the schema.
        calls: whether calls of tools are recognised in it.
    """

    config: SamplingConfig
    choices: int = 1
    stream: bool = False
    usage: bool = False
    logprobs: int | None = None
    slots: bool = False
    schema: Schema | None = None
    rules: str | None = None
    forced: bool = False
    calls: bool = False
    place: str = "response_format"

    @property
    def listed(self) -> int:
        """How many tokens a whole answer lists, at most."""
        tokens = 0 if self.logprobs is None else 1 + self.logprobs
        return self.choices * self.config.max_tokens * tokens


def served_policies() -> list[str]:
    """The policies that can be served without importing anything."""
    rules = {name: POLICIES[name].rule for name in POLICIES.registered if name != "full"}
    return [name for name, rule in rules.items() if rule in NATIVE]


def parse_json(data: bytes, decoder: type[json.JSONDecoder] | None = None) -> Any:
    """The value of a JSON text, read by a decoder.

    Raises:
        ValueError, RecursionError: it is none, has a number that is not finite or half a character, or is too deep.
    """
    value = json.loads(data.decode("utf-8-sig"), cls=decoder, parse_constant=_refuse_number, parse_float=_finite)
    if _HALF.search(data):
        for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):  # others have their turn between them
            piece.encode()
    check_depth(value)
    return value


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse_number(text)


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text[:20]} is not a finite number")


def field(body: Mapping[str, Any], name: str, *kinds: type, of: str = "") -> Any:
    """A field of a request, or of its object `of`; None if it is missing.

    Raises:
        ApiError: it is of another type.
    """
    value = body.get(name)
    fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if value is None or (fits and (not isinstance(value, int | float) or abs(value) < 2**63)):
        return value
    raise wrong(of + name, value, " or ".join(_KINDS[kind] for kind in kinds))


@dataclass(frozen=True)
class Model:
    """What a request is checked against: a model's tokenizer, its number of logits, and the most tokens of a reply."""

    tokenizer: Any
    vocabulary: int
    max_reply: int


def parse_sampled(body: Mapping[str, Any], model: Model, limits: tuple[str, ...], logprobs: int | None) -> Sampled:
    """What a request says about sampling; `limits` are the names of the field with the most tokens of a reply.

    Raises:
        ApiError: a field is wrong.
    """
    stop = field(body, "stop", str, list)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP for text in stops):
        raise wrong("stop", stop, f"a text, or at most {MAX_STOPS}, of up to {MAX_STOP} characters")
    limit, wanted = next(
        ((name, value) for name in limits if (value := field(body, name, int)) is not None), (limits[0], _NO_LIMIT)
    )
    choices = field(body, "n", int)
    choices = 1 if choices is None else choices
    if not 1 <= choices <= MAX_CHOICES:
        raise wrong("n", choices, f"1 to {MAX_CHOICES}")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise wrong("top_logprobs" if "top_logprobs" in body else "logprobs", logprobs, f"0 to {MAX_LOGPROBS}")
    top_k, seed, max_reply = field(body, "top_k", int), field(body, "seed", int), model.max_reply
    max_tokens = max_reply if wanted in (_NO_LIMIT, _FILL_CONTEXT) else min(wanted, max_reply)
    min_tokens = max_tokens if field(body, "ignore_eos", bool) else field(body, "min_tokens", int) or 0
    if min_tokens < 0:
        raise wrong("min_tokens", min_tokens, "0 or more")
    try:
        config = SamplingConfig(
            temperature=field(body, "temperature", int, float),
            top_p=field(body, "top_p", int, float),
            top_k=0 if top_k == _NO_LIMIT else top_k,
            min_p=field(body, "min_p", int, float),
            repetition_penalty=field(body, "repetition_penalty", int, float),
            seed=None if seed == _ANY_SEED else seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            logit_bias=parse_bias(body.get("logit_bias"), model.tokenizer, model.vocabulary),
            thinking_budget=parse_budget(body),
            thinking_message=field(body, "reasoning_budget_message", str) or "",
            stop=stops,
            **{name: value for name in _PENALTIES if (value := field(body, name, int, float)) is not None},
        )
    except ConfigError as error:
        raise renamed(as_api_error(error), {"max_tokens": limit}) from error
    if len(config.thinking_message) > MAX_MESSAGE:
        raise wrong("reasoning_budget_message", config.thinking_message, f"a text of up to {MAX_MESSAGE} characters")
    stream_options = field(body, "stream_options", dict) or {}
    schema, place = parse_schema(body)
    return Sampled(
        config,
        choices,
        bool(field(body, "stream", bool)),
        bool(field(stream_options, "include_usage", bool, of="stream_options.")),
        logprobs,
        bool(field(stream_options, "include_slots", bool, of="stream_options.")),
        schema,
        place=place,
    )


def parse_bias(value: Any, tokenizer: Any, vocabulary: int) -> tuple[tuple[int, float], ...]:
    """What is added to logits: OpenAI's object of token ids, or llama.cpp's list of pairs. Either may have texts, whose
    tokens are all meant, and false, which excludes tokens.

    Raises:
        ApiError: it is something else, or there is no such token.
    """
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    found = dict[int, float]()
    for pair in pairs if isinstance(pairs, list) else [value]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise wrong("logit_bias", value, _BIASES)
        name, bias = pair
        number = float(bias) if type(bias) in (int, float) and abs(bias) <= _MAX_BIAS else None
        number = -_MAX_BIAS if bias is False else number
        if isinstance(name, str) and not (isinstance(value, dict) and re.fullmatch("[0-9]{1,9}", name)):
            tokens = tokenizer(name, add_special_tokens=False)["input_ids"]
        else:
            tokens = [int(name)] if isinstance(name, str) or type(name) is int else []
        if number is None or not tokens or not all(0 <= token < vocabulary for token in tokens):
            raise wrong("logit_bias", {str(name): bias}, f"{_BIASES}; tokens are 0 to {vocabulary - 1}")
        found |= dict.fromkeys(tokens, number)
    return tuple(found.items())


def is_kept(body: Mapping[str, Any]) -> bool:
    """Whether the conversation of a request may be kept on disk.

    Raises:
        ApiError: ``store`` is not true or false.
    """
    return field(body, "store", bool) is not False
