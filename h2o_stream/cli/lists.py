"""Reads what stands between commas: policies, windows, sizes, shapes."""

from __future__ import annotations

import re
from dataclasses import replace

from h2o_stream.cli.options import CacheOptions
from h2o_stream.config import POLICIES, CacheConfig, Shape
from h2o_stream.errors import ConfigError


def policies_of(text: str) -> list[str]:
    """The policies in a list.

    Raises:
        ConfigError: it is none.
    """
    policies = listed(text, "--policies")
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"policy {policy!r} is unknown; --policies takes some of {', '.join(POLICIES)}")
    return policies


def configs_of(policies: str, windows: str, seeds_of_draws: str, cache: CacheOptions) -> list[CacheConfig]:
    """Every policy with every window and, if it draws, every seed; ``full`` comes first and once."""
    configs: list[CacheConfig] = []
    for policy in dict.fromkeys(policies_of(policies)):
        if policy == "full":
            configs.append(CacheConfig(policy, chunk=cache.chunk, device=cache.cache_device))
            continue
        for window in numbers_of(windows, "--windows"):
            seeds = numbers_of(seeds_of_draws, "--seeds") if POLICIES[policy].draws else [0]
            configs += [replace(cache.cache_config(policy, window), seed=seed) for seed in seeds]
    return sorted(configs, key=lambda config: config.policy != "full")


_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(text: str, name: str) -> int:
    """A size with its unit.

    Raises:
        ConfigError: it is none.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not size or size[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; {name} takes one like 128MiB or 2GiB")
    return int(float(size[1]) * _UNITS[size[2].upper()])


def shape_of(text: str) -> Shape:
    """A request like 512+32.

    Raises:
        ConfigError: it is none.
    """
    prompt, _, new = text.partition("+")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
        raise ConfigError(f"{text!r} is not a shape; --shapes takes prompt and generated tokens like 512+32")
    return Shape(int(prompt), int(new))


def numbers_of(text: str, name: str) -> list[int]:
    """Whole numbers, separated by commas.

    Raises:
        ConfigError: it is none.
    """
    items = listed(text, name)
    for item in items:
        if not item.isdecimal():
            raise ConfigError(f"{item!r} is not a whole number; {name} takes numbers and commas")
    return [int(item) for item in items]


def listed(text: str, name: str) -> list[str]:
    """What stands between commas.

    Raises:
        ConfigError: it is none.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError(f"{name} is empty; give one or more, separated by commas")
    return items
