"""The options that comparisons share. Imports no torch, so that ``--help`` is fast and wrong options fail fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from h2o_stream.base.options import Option, listed, numbers, sizes, some_of
from h2o_stream.base.registry import Registry, resolve
from h2o_stream.base.resources import require_matplotlib, require_package
from h2o_stream.base.texts import read_text
from h2o_stream.config import DEFAULT_WINDOW, POLICIES, CacheConfig, ModelConfig
from h2o_stream.errors import ConfigError

Policies = Annotated[Sequence[str], Option("Policies, separated by commas.", parse=some_of("policy", POLICIES))]
AUTO = "auto"


def _windows(text: str, flag: str) -> tuple[int | str, ...]:
    return tuple(x.lower() if x.lower() == AUTO else numbers(x, flag)[0] for x in listed(text, flag))


def windows_if_any(text: str, flag: str) -> tuple[int | str, ...]:
    """The windows between commas; () for an option that is empty."""
    return _windows(text, flag) if text else ()


Windows = Annotated[
    Sequence[int | str],
    Option("Windows, separated by commas; auto as in h2o-chat.", "--windows", "--num-window-length", parse=_windows),
]
CacheSizes = Annotated[
    Sequence[int], Option("Sizes of the cache, as 3MiB,6MiB: equal bytes; replaces --windows.", parse=sizes)
]
Window = Annotated[int, Option("Tokens kept per layer and KV head.")]
Ray = Annotated[str | None, Option("Run the jobs on a Ray cluster: auto, or its address as host:port (extra cluster).")]
Seeds = Annotated[Sequence[int], Option("Seeds of random, separated by commas.", parse=numbers)]


_SETS_WINDOW = ("cache_size", "heavy_ratio", "recent_ratio")


def sets_window(cache: Mapping[str, Any]) -> bool:
    """Whether these arguments of `CacheConfig` choose the window."""
    return any(cache.get(name) is not None for name in _SETS_WINDOW)


def configs_of(
    policies: Sequence[str],
    windows: Sequence[int | str],
    seeds: Sequence[int],
    cache: Mapping[str, Any],
    cache_sizes: Sequence[int] = (),
) -> list[CacheConfig]:
    """Every policy with every window and, if it is random, every seed; ``full`` comes first and once.

    `cache` has the other arguments of `CacheConfig`. If it chooses the window, windows are ignored; sizes, in bytes,
    replace them.
    """
    if cache_sizes:
        sized = [configs_of(policies, windows, seeds, {**cache, "cache_size": size}) for size in cache_sizes]
        configs = list(dict.fromkeys(config for configs in sized for config in configs))
        return sorted(configs, key=lambda config: config.policy != "full")
    if sets_window(cache):
        windows = (DEFAULT_WINDOW,)
    configs = []
    for policy in policies:
        if policy == "full":
            options = {name: cache[name] for name in ("chunk", "device") if name in cache}
            configs.append(
                CacheConfig("full", **{**options, **({"device": "cpu"} if options.get("device") == "disk" else {})})
            )
            continue
        for window in windows:
            chosen = {"window": window} if window != AUTO else {"auto_window": int(cache.get("heavy") is None)}
            config = CacheConfig(**{**cache, "policy": policy, **chosen})
            configs += [replace(config, seed=seed) for seed in (seeds if POLICIES[policy].draws else (0,))]
    return sorted(dict.fromkeys(configs), key=lambda config: config.policy != "full")


VARIANTS: Registry[Any] = Registry("h2o_stream.variants", {}, lambda named: named)
"""Comparisons of other packages that take the options of one of ours: see `ComparisonOptions.variant`."""

RUNNERS: Registry[Any] = Registry("h2o_stream.runners", {}, lambda named: named)
"""What runs jobs elsewhere: ``run_on_cluster`` of the laboratory, say, and others that take the same."""


@dataclass(frozen=True, kw_only=True)
class InAll:
    """Values of the fields of a comparison that is a part of ``h2o-compare all``, with and without --quick."""

    quick: Mapping[str, Any]
    thorough: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Base of the options of a comparison. A subclass adds fields; its docstring is the help of its subcommand.

    A field ``engine: EngineChoice`` brings the option --engine. `comparison` is ``module:class`` of the `Comparison`,
    which is made from these options; `page` is ``module:function`` that lays out its records, see `ui.pages`. `cache`
    has arguments of `CacheConfig` for all policies.

    Raises:
        ConfigError: options are wrong or contradict each other.
    """

    comparison: ClassVar[str]
    page: ClassVar[str] = "h2o_stream.ui.pages:plain_page"
    in_all: ClassVar[InAll | None] = None

    policies: Sequence[str] = ()
    windows: Sequence[int | str] = (DEFAULT_WINDOW,)
    seeds: Sequence[int] = (0,)
    out: Annotated[
        Path | None,
        Option("Folder for settings, records, tables and plots; an interrupted comparison resumes there."),
    ] = None
    ray: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if sets_window(self.cache) and tuple(self.windows) != tuple(type(self).windows):
            flag = next(name for name in _SETS_WINDOW if self.cache.get(name) is not None).replace("_", "-")
            raise ConfigError(
                f"windows is {','.join(map(str, self.windows))}, but --{flag} sets it; leave out --windows"
            )
        _ = self.configs

    @property
    def configs(self) -> list[CacheConfig]:
        """What is compared: every policy with every window and seed."""
        return configs_of(self.policies, self.windows, self.seeds, self.cache)

    def check(self) -> None:
        """Raise H2OStreamError for what can be found before a model is loaded: missing files and packages."""
        if self.out is not None:
            require_matplotlib()
        if self.ray:
            require_package("ray", "ray", "--ray needs Ray")
        texts = getattr(self, "text", None) or ()
        for path in [texts] if isinstance(texts, Path) else texts:
            read_text(path, f"--text {path}")

    @property
    def variant(self) -> str:
        """The name in `VARIANTS` of what measures with these options, in place of `comparison`; or nothing."""
        return ""

    def make(self) -> Any:
        """Import the comparison and make it."""
        return (VARIANTS[self.variant] if self.variant else resolve(self.comparison))(self)
