"""Every setting and every default. Imports no torch and no command-line library.

``None`` in a config stands for the default of the policy or the model; `CacheConfig.plan` resolves it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from h2o_stream.errors import ConfigError
from h2o_stream.registry import Registry

Positions = Literal["gap", "rolling", "absolute"]
Budgets = Literal["measured", "equal"]
CacheDevice = Literal["auto", "cpu", "disk"]
AtContext = Literal["continue", "stop"]
EngineChoice = Literal["auto", "eager"]
RecallMode = Literal["auto", "off"]
ThinkMode = Literal["show", "fold", "hide", "off"]
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "int8", "int4")

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_POLICY = "h2o"
DEFAULT_WINDOW = 256
DEFAULT_CHUNK = 64
"""Tokens between two evictions of a prefill. A small chunk gives scores close to decoding's, a large one is faster."""

PREFILL_STEP, PREFILL_STEP_MAX = 128, 1024
"""Prompt tokens per forward, for large and for small models. Larger matrix products are faster."""

PREFILL_WORK = 15 * 10**10
"""Approximate multiplications of a forward on a CPU: few enough that Ctrl-C stops it soon."""

DEFAULT_TEMPERATURE = 0.7
DEFAULT_TOP_P = 0.95
DEFAULT_TOP_K = 0

MODEL_SAMPLING: Mapping[str, Mapping[str, float]] = {
    # Nothing is recommended with it, and a model of this size repeats itself: docs/fidelity.md has the figures.
    DEFAULT_MODEL: {"repetition_penalty": 1.1},
}
"""Sampling of models, by a part of the name, where their generation config says nothing."""

BENCH = "bench"
BENCH_TEMPERATURES: Mapping[str, float] = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
"""MT-Bench's temperatures of its categories."""

CHAT_RECALL: RecallMode = "auto"
"""The mode of recall in ``h2o-chat``. Elsewhere it is that of `RecallConfig`."""

THINKING_VARIABLES = ("enable_thinking", "thinking", "reasoning")
"""Names by which chat templates let thinking be switched on and off."""

HUB_CONNECT_S = 2.5
"""How long the Hub may take to accept a connection before the files on this machine have to do."""

MIN_EVICTABLE = 8
"""Slots that pinned tokens must leave free, so that the window still moves."""

DEFAULT_SPAN = 4096
"""Span of ``gap`` for a model without a maximum position."""

KV_BITS = (16, 8, 6, 4, 2)

SIZED_KV_BITS = 6
"""Bits of a cache that is given by its size: the most slots per byte before the loss of rounding counts."""

RESIDUAL = {8: 1, 6: 1, 4: 12, 2: 12}
EXACT_SINKS = {8: 0, 6: 4, 4: 4, 2: 4}
"""Newest and first tokens that a cache of so many bits holds in full precision: their attention is the largest, and the
keys of the first would widen the grids of all others. 8 bits lose nothing even there. The token being fed is always one
of the newest."""


@dataclass(frozen=True)
class PolicyDefaults:
    """Default budgets and rules of a policy.

    Attributes:
        heavy_share: fraction of the unpinned window for heavy hitters, 0 to 1.
        sinks: first tokens of the stream that are never evicted.
        decay: factor on the accumulated scores per token seen; 1 is the papers' plain sum.
        positions: where RoPE sees the kept tokens.
        rule: ``module:class`` of the `Policy` that chooses among the unprotected tokens; a `Policy` class with these as
            its ``defaults`` leaves it out.
        draws: whether the rule is random and needs a seed.
        budgets: ``equal`` windows for all heads, or ``measured``: larger ones for retrieval heads, with the same mean.
        long_term: weight of the long-term score beside the decaying one.
    """

    heavy_share: float
    sinks: int
    decay: float
    positions: Positions
    rule: str = ""
    draws: bool = False
    budgets: Budgets = "equal"
    long_term: float = 0.0


_RULES = "h2o_stream.cache.policies"

_POLICIES = {
    "h2o": PolicyDefaults(0.5, 4, 0.99, "gap", f"{_RULES}.long_term:LongTerm", budgets="measured", long_term=2.0),
    "h2o-paper": PolicyDefaults(0.5, 0, 1.0, "rolling", f"{_RULES}.accumulated:Accumulated"),
    "tova": PolicyDefaults(1.0, 0, 1.0, "rolling", f"{_RULES}.tova:Tova"),
    "random": PolicyDefaults(0.5, 4, 1.0, "rolling", f"{_RULES}.random:Random", draws=True),
    "sink": PolicyDefaults(0.0, 4, 1.0, "rolling", f"{_RULES}.recency:Recency"),
    "recent": PolicyDefaults(0.0, 0, 1.0, "rolling", f"{_RULES}.recency:Recency"),
    "full": PolicyDefaults(0.0, 0, 1.0, "absolute", f"{_RULES}.recency:Recency"),
    "compensation": PolicyDefaults(
        0.5, 4, 0.99, "gap", f"{_RULES}.compensation:Compensation", budgets="measured", long_term=2.0
    ),
    "moments": PolicyDefaults(0.5, 4, 0.99, "gap", f"{_RULES}.moments:Moments", budgets="measured", long_term=2.0),
}


def _policy_defaults(named: Any) -> PolicyDefaults:
    """The defaults that an entry point names: `PolicyDefaults`, or the ``defaults`` of a `Policy` class."""
    if isinstance(named, PolicyDefaults):
        return named
    defaults: PolicyDefaults = named.defaults
    return replace(defaults, rule=f"{named.__module__}:{named.__qualname__}")


POLICIES = Registry("h2o_stream.policies", _POLICIES, _policy_defaults)
"""Defaults of all policies, by name."""


@dataclass(frozen=True)
class CachePlan:
    """A `CacheConfig` with all defaults filled in. Counts are tokens per layer and KV head, means if budgets are
    measured.

    ``window == sinks + heavy + recent``; ``span + window + chunk`` is the largest distance RoPE can meet.
    """

    policy: str
    window: int
    sinks: int
    heavy: int
    recent: int
    decay: float
    positions: Positions
    span: int
    chunk: int
    kv_bits: int = 16
    seed: int = 0
    budgets: Budgets = "equal"
    long_term: float = 0.0

    @property
    def residual(self) -> int:
        """Newest tokens that a quantized cache keeps in full precision, the one being fed included."""
        return min(RESIDUAL[self.kv_bits], self.recent + 1)

    @property
    def exact_sinks(self) -> int:
        """Sinks that a quantized cache keeps in full precision."""
        return min(EXACT_SINKS[self.kv_bits], self.sinks)


@dataclass(frozen=True)
class CacheConfig:
    """How much of the stream the cache keeps, and which part.

    Args:
        policy: a name in `POLICIES`.
        window: tokens kept per layer and KV head. ``full`` ignores it.
        heavy: slots of the window for heavy hitters (tokens, not a ratio).
        sinks: first tokens of the stream that are never evicted.
        decay: factor on accumulated scores per token seen, in (0, 1].
        positions: ``gap``, ``rolling`` or ``absolute``.
        span: with ``gap``, the distance in tokens up to which distances are true.
        chunk: tokens between two evictions of a prefill; 0 takes the whole prompt at once.
        kv_bits: bits per stored key and value number; 16 leaves the model's dtype as it is.
        heavy_ratio: heavy slots as a part of the first prompt of a stream, as in the papers; with `recent_ratio`
            it takes the place of `window` and `heavy`.
        cache_size: bytes of the cache of one stream, all bookkeeping counted: `window` becomes as large as fits, and
            `kv_bits` 6 unless it is given. None leaves `window` as it is.
        recent_ratio: recent slots as a part of the first prompt of a stream.
        seed: of a random policy; the others ignore it.
        budgets: ``measured`` gives retrieval heads larger windows (`cache.retrieval_heads`), so that `window` and
            `heavy` are means; ``equal`` gives every head the same.
        long_term: weight of the long-term score of ``h2o``; 0 disables it, which saves four bytes per slot.
        device: ``auto`` keeps keys and values where each layer computes; ``cpu`` keeps them in host memory and attends
            there, so that only the new token's are transferred.

    Raises:
        ConfigError: a value is outside its limits, naming value, limit and option.
    """

    policy: str = DEFAULT_POLICY
    window: int = DEFAULT_WINDOW
    heavy: int | None = None
    sinks: int | None = None
    decay: float | None = None
    positions: Positions | None = None
    span: int | None = None
    chunk: int | None = None
    kv_bits: int | None = None
    heavy_ratio: float | None = None
    recent_ratio: float | None = None
    seed: int = 0
    budgets: Budgets | None = None
    long_term: float | None = None
    cache_size: int | None = None
    device: CacheDevice = "auto"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy {self.policy!r} is unknown; --policy takes one of {', '.join(POLICIES)}")
        for name, option, choices in (
            ("positions", "--positions", get_args(Positions)),
            ("budgets", "--budgets", get_args(Budgets)),
            ("device", "--cache-device", get_args(CacheDevice)),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise ConfigError(f"{name} {value!r} is unknown; {option} takes one of {', '.join(choices)}")
        for name, minimum in (("window", 1), ("heavy", 0), ("sinks", 0), ("span", 0), ("chunk", 0)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}; --{name} takes a whole number of tokens")
            if value < minimum:
                raise ConfigError(f"{name} is {value}; --{name} must be at least {minimum}")
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ConfigError(f"decay is {self.decay}; --decay must be above 0 and at most 1")
        if self.long_term is not None and not 0 <= self.long_term < float("inf"):
            raise ConfigError(f"long_term is {self.long_term}; --long-term must be 0 or above")
        if self.kv_bits not in (None, *KV_BITS):
            raise ConfigError(f"kv_bits is {self.kv_bits}; --kv-bits takes one of {', '.join(map(str, KV_BITS))}")
        if self.cache_size is not None:
            self._check_size()
        if self.policy == "full":
            if self.device == "disk":
                raise ConfigError(
                    "device is 'disk', but policy full keeps transformers' own cache; --cache-device takes cpu for it"
                )
            if self.kv_bits not in (None, 16):
                raise ConfigError(
                    f"kv_bits is {self.kv_bits}, but policy full keeps transformers' own cache; --kv-bits needs "
                    "another --policy, such as recent with a large --window"
                )
        elif self.by_ratio:
            self._check_ratios()
        else:
            self._budgets(self.window, self.heavy)

    @property
    def label(self) -> str:
        """The policy, and the seed where it is not the first."""
        return f"{self.policy} #{self.seed}" if self.seed else self.policy

    @property
    def by_ratio(self) -> bool:
        """Whether the budgets wait for the first prompt of a stream."""
        return self.heavy_ratio is not None or self.recent_ratio is not None

    @property
    def ratios_text(self) -> str:
        """The ratios, for people; empty without any."""
        ratios = f"{self.heavy_ratio or 0:.0%} heavy + {self.recent_ratio or 0:.0%} recent"
        return ratios if self.by_ratio and self.policy != "full" else ""

    def _check_size(self) -> None:
        size = self.cache_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"cache_size is {size!r}; --cache-size takes a number of bytes, such as 6MiB")
        if self.policy == "full":
            raise ConfigError(f"cache_size is {size}, but policy full grows; --cache-size needs another --policy")
        if self.by_ratio or self.window != DEFAULT_WINDOW:
            raise ConfigError(
                f"cache_size is {size}, which chooses the window; --cache-size goes without --window "
                "and without --heavy-ratio and --recent-ratio"
            )

    def _check_ratios(self) -> None:
        for name in ("heavy_ratio", "recent_ratio"):
            ratio = getattr(self, name) or 0.0
            if not 0 <= ratio <= 1:
                raise ConfigError(f"{name} is {ratio}; --{name.replace('_', '-')} must be between 0 and 1")
        if not self.recent_ratio:
            raise ConfigError("recent_ratio is 0; --recent-ratio must be above 0, the newest token has to stay")
        if self.heavy is not None or self.window != DEFAULT_WINDOW:
            raise ConfigError(
                "--heavy-ratio and --recent-ratio set the window by the first prompt; leave out --window and --heavy"
            )

    def for_prompt(self, tokens: int) -> CacheConfig:
        """The same budgets in tokens, as h2o_hf resolves its ratios: each is a part of the prompt, rounded down.

        Args:
            tokens: length of the first prompt; the longest one of a batch.
        """
        if not self.by_ratio or self.policy == "full":
            return self
        heavy = int(tokens * (self.heavy_ratio or 0.0))
        recent = max(int(tokens * (self.recent_ratio or 0.0)), 1)
        sinks = POLICIES[self.policy].sinks if self.sinks is None else self.sinks
        return replace(
            self, window=sinks + heavy + recent, heavy=heavy, sinks=sinks, heavy_ratio=None, recent_ratio=None
        )

    def _budgets(self, window: int, heavy: int | None) -> tuple[int, int, int]:
        """(sinks, heavy, recent), summing to the window."""
        defaults = POLICIES[self.policy]
        sinks = min(defaults.sinks, window // 2) if self.sinks is None else self.sinks
        if sinks >= window:
            raise ConfigError(
                f"sinks is {sinks}, at most {window - 1} fit a window of {window}; lower --sinks or raise --window"
            )
        max_heavy = window - sinks - 1
        heavy = min(int((window - sinks) * defaults.heavy_share), max_heavy) if heavy is None else heavy
        if heavy > max_heavy:
            raise ConfigError(
                f"heavy is {heavy}, at most {max_heavy} leaves a recent token beside {sinks} sinks "
                f"in a window of {window}; lower --heavy or raise --window"
            )
        return sinks, heavy, window - sinks - heavy

    def plan(self, context: int | None = None) -> CachePlan:
        """Resolve what was left open.

        Args:
            context: distances the model was trained for; None when it has no such limit.

        Raises:
            ConfigError: the distances asked for do not fit the model's positions.
        """
        defaults = POLICIES[self.policy]
        kv_bits = self.kv_bits or (16 if self.cache_size is None else SIZED_KV_BITS)
        long_term = defaults.long_term if self.long_term is None else self.long_term
        positions = self.positions or defaults.positions
        decay = defaults.decay if self.decay is None else self.decay
        fitting = DEFAULT_CHUNK if context is None else max(min(DEFAULT_CHUNK, context - self.window), 1)
        chunk = fitting if self.chunk is None else self.chunk
        if self.policy == "full":
            return CachePlan("full", 0, 0, 0, 0, decay, "absolute", 0, chunk)
        sinks, heavy, recent = self._budgets(self.window, self.heavy)
        span = 0
        if positions != "absolute":
            room = DEFAULT_SPAN if context is None else context - self.window - (chunk or 1)
            span = room if self.span is None or positions == "rolling" else self.span
            if context is not None and (room < 0 or span > room):
                spanned = f"span {span} + " if span > room else ""
                raise ConfigError(
                    f"{spanned}window {self.window} + chunk {chunk or 1} passes the {context} positions the model "
                    f"was trained for; lower {'--span, ' if spanned else ''}--window or --chunk"
                )
        return CachePlan(
            self.policy,
            self.window,
            sinks,
            heavy,
            recent,
            decay,
            positions,
            span,
            chunk,
            kv_bits,
            self.seed,
            self.budgets or defaults.budgets,
            long_term,
        )


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled.

    Args:
        temperature: 0 is greedy; ``bench`` is `BENCH_TEMPERATURES` by the question's category; None is what the model's
            generation config recommends, or `MODEL_SAMPLING`, or `DEFAULT_TEMPERATURE`.
        top_p: keep the most probable tokens up to this mass; None as above.
        top_k: keep this many most probable tokens; 0 keeps all; None as above.
        min_p: drop tokens below this fraction of the probability of the most probable one; None as above, or 0.
        repetition_penalty: above 1 makes the tokens of this turn less likely to be repeated; None as above, or 1. At
            temperature 0, which takes the most probable token, None is 1.
        seed: of the sampler; None chooses one and reports it.
        max_tokens: maximum tokens of a reply.
        stop: strings that end a reply and are not shown.
    """

    temperature: float | Literal["bench"] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int = 512
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.temperature, str):
            if self.temperature != BENCH:
                raise ConfigError(
                    f"temperature is {self.temperature!r}; --temp takes a number, or {BENCH} in h2o-stream"
                )
        elif self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; --temp must be 0 (greedy) or above")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; --top-p must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; --top-k must be 0 (all) or above")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; --min-p must be between 0 and 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; --repetition-penalty must be above 0")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; --seed must be between 0 and 2**63 - 1")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; --max-tokens must be at least 1")
        if any(not stop for stop in self.stop):
            raise ConfigError("a stop string is empty; --stop needs at least one character")


def model_sampling(name: str) -> Mapping[str, float]:
    """Our own sampling defaults of a model: those of the first entry of `MODEL_SAMPLING` that its name contains."""
    return next((values for known, values in MODEL_SAMPLING.items() if known in name.lower()), {})


@dataclass(frozen=True)
class RecallConfig:
    """Whether evicted passages are read again before a reply, and how many.

    Args:
        mode: ``auto`` searches for every message; ``off`` never does.
        budget: most tokens to read again in a turn; None is a quarter of the window.
    """

    mode: RecallMode = "off"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(RecallMode):
            raise ConfigError(f"recall is {self.mode!r}; --recall takes {' or '.join(get_args(RecallMode))}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"the budget of recall is {self.budget} tokens; it must be at least 1")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded.

    Args:
        model: ``smollm2-135m``, a Hub id, a local folder, a ``.gguf`` file or ``repo:file.gguf``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` or a torch device such as ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        device_map: passed to transformers and accelerate (``auto`` spreads the layers); replaces `device`.
        max_memory: with `device_map`, the maximum for weights on each device, as ``0=10GiB,cpu=24GiB`` or, in parts
            of all weights, ``0=20%,cpu=80%``; weights that fit nowhere are read from disk in every step.
        tensor_parallel: every process of ``torchrun`` holds a shard of each matrix, and evicts for its own heads.
        offline: use only files on this machine, no network.
        quantize: format of the weight matrices on a CPU: ``none``, ``int8``, ``int4``, or ``auto``, which keeps the
            format of a quantized file and otherwise takes the widest that fits the free memory comfortably.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    offline: bool = False
    quantize: str = "auto"
    max_memory: str | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; --dtype takes one of {', '.join(DTYPES)}")
        if self.quantize not in QUANTIZATIONS:
            raise ConfigError(
                f"quantize {self.quantize!r} is unknown; --quantize takes one of {', '.join(QUANTIZATIONS)}"
            )
        ways = {
            "--tensor-parallel": self.tensor_parallel,
            f"--device-map {self.device_map}": self.device_map,
            f"--quantize {self.quantize}": self.quantize not in ("auto", "none"),
        }
        chosen = [way for way, wanted in ways.items() if wanted]
        if len(chosen) > 1:
            raise ConfigError(f"{chosen[0]} does not go with {chosen[1]}; leave one out")
        if self.max_memory and not self.device_map:
            raise ConfigError(f"max_memory is {self.max_memory}, which needs --device-map auto")
        self.memory_by_device()

    def memory_by_device(self) -> dict[int | str, str] | None:
        """`max_memory` in the form of accelerate.

        Raises:
            ConfigError: it cannot be parsed.
        """
        if not self.max_memory:
            return None
        sizes: dict[int | str, str] = {}
        for item in self.max_memory.split(","):
            name, _, size = (part.strip() for part in item.partition("="))
            if not (name.isdecimal() or name == "cpu") or not re.fullmatch(r"\d+(\.\d+)?([KMG]i?B|%)", size):
                raise ConfigError(
                    f"{item!r} is no device and size; --max-memory takes them like 0=10GiB,cpu=24GiB or 0=20%,cpu=80%"
                )
            sizes[int(name) if name.isdecimal() else name] = size
        return sizes


@dataclass(frozen=True)
class Settings:
    """All settings of a conversation.

    Args:
        model: the model.
        cache: which tokens are kept.
        sampling: how tokens are sampled.
        system: the system prompt; None is the default of the model's template.
        at_context: whether a cache with absolute positions continues past the model's context or stops there.
        engine: ``auto`` runs the native step where it serves the model, ``eager`` runs transformers' forward.
        recall: whether evicted passages are read again.
        think: how thinking is drawn: ``show`` all of it, ``fold`` it to a line, or ``hide`` it; ``off`` switches it off
            where the model's template can, and is ``fold`` elsewhere.
        tools: JSON schemas of tools that the chat template describes.
    """

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    sampling: SamplingConfig = SamplingConfig()
    system: str | None = None
    at_context: AtContext = "continue"
    engine: EngineChoice = "auto"
    recall: RecallConfig = RecallConfig()
    think: ThinkMode = "fold"
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineChoice):
            raise ConfigError(f"engine is {self.engine!r}; --engine takes {', '.join(get_args(EngineChoice))}")
        if self.think not in get_args(ThinkMode):
            raise ConfigError(f"think is {self.think!r}; --think takes {', '.join(get_args(ThinkMode))}")


@dataclass(frozen=True)
class ChatConfig:
    """Settings of ``h2o-chat``.

    Args:
        prompt: answer this and exit; None reads messages.
        single_turn: exit after the first reply.
        session: save the conversation under this name, and resume it if it exists.
        retell: replay the transcript of a session whose state does not fit.
        plain: print replies as plain text, not rendered as Markdown.
        vim: vi key bindings in place of Emacs'.
        history: keep what is typed at the prompt in a file, for the next chats.
        record: a file for a recording, which ``h2o-stream --replay`` plays back.
    """

    prompt: str | None = None
    single_turn: bool = False
    session: str | None = None
    retell: bool = False
    plain: bool = False
    vim: bool = False
    history: bool = True
    record: Path | None = None
