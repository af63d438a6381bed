"""Which tokens the cache keeps, how they are stored, and how prompts are read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from h2o_stream.config.policies import DEFAULT_POLICY, POLICIES, Budgets, Positions
from h2o_stream.errors import ConfigError

CacheDevice = Literal["auto", "cpu", "disk"]

DEFAULT_WINDOW = 256
AUTO_WINDOWS = (DEFAULT_WINDOW, 448, 768, 1024, 1536, 2048, 3072)
AUTO_STEP_SHARE, AUTO_MEMORY_SHARE = 1 / 12, 1 / 10
"""The windows among which ``auto`` chooses: the largest of which the cache takes at most these shares of the bytes of
weights that a step reads, and of free memory."""

AUTO_8_BITS = range(DEFAULT_WINDOW + 1, 1024)
"""Windows that are in 8 bits where ``auto`` has chosen them: small models lose more without a slot than by rounding."""

AUTO_QUERIES = 4
"""Query heads per KV head up to which a step waits for memory. With more of them attention is bound by arithmetic, and
a slot counts for more than its bytes in proportion."""

DEFAULT_CHUNK = 64
"""Tokens between two evictions of a prefill. A small chunk gives scores close to decoding's, a large one is faster."""

PREFILL_STEP, PREFILL_STEP_MAX = 128, 1024
"""Prompt tokens per forward, for large and for small models. Larger matrix products are faster."""

PREFILL_WORK = 15 * 10**10
"""Approximate multiplications of a forward on a CPU: few enough that Ctrl-C stops it soon."""


def prefill_step(weights: int) -> int:
    """How many prompt tokens to feed in one forward on a CPU: as many as a small machine takes in a second or two.

    Args:
        weights: numbers or, where they are packed, bytes.
    """
    step = PREFILL_STEP
    while step < PREFILL_STEP_MAX and 2 * step * weights <= PREFILL_WORK:
        step *= 2
    return step


MIN_EVICTABLE = 8
"""Slots that pinned tokens must leave free, so that the window still moves."""

DEFAULT_SPAN = 4096
"""Span of ``gap`` for a model without a maximum position."""

KV_BITS = (16, 8, 6, 4, 2)

SIZED_KV_BITS = 6
"""Bits of a cache that is given by its size: the most slots per byte before the loss of rounding counts."""

RESIDUAL = {16: 0, 8: 1, 6: 1, 4: 12, 2: 12}
EXACT_SINKS = {16: 0, 8: 0, 6: 4, 4: 4, 2: 4}
"""Newest and first tokens that a cache of so few bits holds in full precision: their attention is the largest, and the
keys of the first would widen the grids of all others. 8 bits lose nothing even there. The token being fed is always one
of the newest."""


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
    def rule(self) -> str:
        """``module:class`` of the policy. Without heavy slots there is nothing to choose: every policy is `Recency`."""
        return POLICIES[self.policy if self.heavy else "recent"].rule

    @property
    def residual(self) -> int:
        """Newest tokens with slots of their own, in full precision, the one being fed included; 0 with 16 bits."""
        return min(RESIDUAL[self.kv_bits], self.recent + 1)

    @property
    def exact_sinks(self) -> int:
        """Sinks with slots of their own, in full precision; 0 with 16 bits."""
        return min(EXACT_SINKS[self.kv_bits], self.sinks)


@dataclass(frozen=True)
class CacheConfig:
    """How much of the stream the cache keeps, and which part.

    Args:
        policy: a name in `POLICIES`.
        window: tokens kept per layer and KV head. ``full`` ignores it.
        auto_window: 1 or more chooses the window by the size of the model, one of `AUTO_WINDOWS`, so that the caches of
            so many streams fit into memory; 0 takes `window` as it is.
        heavy: slots of the window for heavy hitters (tokens, not a ratio).
        sinks: first tokens of the stream that are never evicted.
        decay: factor on accumulated scores per token seen, in (0, 1].
        positions: ``gap``, ``rolling`` or ``absolute``.
        span: with ``gap``, the distance in tokens up to which distances are true.
        chunk: tokens between two evictions of a prefill; 0 takes the whole prompt at once.
        kv_bits: bits per stored key and value number; 16 leaves the model's dtype as it is. None is 16, unless `window`
            or `cache_size` says otherwise.
        heavy_ratio: heavy slots as a part of the first prompt of a stream, as in the papers; with `recent_ratio`
            it takes the place of `window` and `heavy`.
        cache_size: bytes of the cache of one stream, all bookkeeping counted: `window` becomes as large as fits, and
            `kv_bits` 6 unless it is given. None leaves `window` as it is.
        recent_ratio: recent slots as a part of the first prompt of a stream.
        max_window: largest window that pins may let it grow to; None for what the model's context allows.
        seed: seed of a random policy; the others ignore it.
        budgets: ``measured`` gives retrieval heads larger windows (`attachment.retrieval_heads`), so that `window` and
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
    max_window: int | None = None
    device: CacheDevice = "auto"
    auto_window: int = 0

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

    @property
    def _kv_bits(self) -> int:
        if self.kv_bits is None and self.auto_window:
            return 8 if self.window in AUTO_8_BITS else 16
        return self.kv_bits or (16 if self.cache_size is None else SIZED_KV_BITS)

    def grown_plan(self, window: int, context: int | None = None) -> CachePlan:
        """The plan with a larger window: heavy slots keep their proportion, and a span leaves room for the window."""
        sinks, heavy, recent = self._budgets(self.window, self.heavy)
        grown = None if self.heavy is None else (window - sinks) * heavy // (heavy + recent)
        plan = replace(self, window=window, heavy=grown, span=None, kv_bits=self._kv_bits).plan(context)
        if self.span is None or plan.positions != "gap":
            return plan
        return replace(plan, span=self.span if context is None else min(self.span, plan.span))

    def plan(self, context: int | None = None) -> CachePlan:
        """Resolve what was left open.

        Args:
            context: distances the model was trained for; None when it has no such limit.

        Raises:
            ConfigError: the distances asked for do not fit the model's positions.
        """
        defaults = POLICIES[self.policy]
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
            self._kv_bits,
            self.seed,
            self.budgets or defaults.budgets,
            long_term,
        )
