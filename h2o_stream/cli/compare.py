"""``h2o-compare``: what each policy costs and gives, on equal input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.cli import run
from h2o_stream.cli.options import CacheOptions, ModelOptions, OutputOptions, option, takes
from h2o_stream.config import DEFAULT_WINDOW, POLICIES, CacheConfig
from h2o_stream.errors import ConfigError
from h2o_stream.session.records import Records

app = run.app()


@app.callback()
def compare() -> None:
    """Compare cache policies with each other and with a full cache."""


@dataclass(frozen=True)
class NllOptions:
    """What is compared on what."""

    text: Annotated[str, option("Comparison", "--text", help="Text files, separated by commas.")]
    policies: Annotated[str, option("Comparison", "--policies", help="Policies, separated by commas.")] = (
        "full,recent,sink,h2o-paper,h2o"
    )
    windows: Annotated[str, option("Comparison", "--windows", help="Windows, separated by commas.")] = str(
        DEFAULT_WINDOW
    )
    tokens: Annotated[int, option("Comparison", "--tokens", help="Tokens predicted per text.", min=1)] = 4096


@app.command()
@takes(NllOptions, ModelOptions, CacheOptions, OutputOptions)
def nll(comparison: NllOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Negative log-likelihood of long texts, streamed through each policy's cache.

    A full cache is compared inside the model's context only. The chunk is the number of tokens between two
    evictions; 1 is exactly what decoding does.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        configs = _configs(comparison, cache)
        texts = [Path(text) for text in _listed(comparison.text, "--text")]
        with Records(output.jsonl) as records:
            with run.loading(model_config, output) as terminal:
                from h2o_stream.ui.compare import compare_nll
            compare_nll(model_config, configs, texts, comparison.tokens, terminal, records)


def _configs(comparison: NllOptions, cache: CacheOptions) -> list[CacheConfig]:
    """Every policy with every window; ``full`` has none and appears once."""
    configs: list[CacheConfig] = []
    for policy in _listed(comparison.policies, "--policies"):
        if policy not in POLICIES:
            raise ConfigError(f"policy {policy!r} is unknown; --policies takes some of {', '.join(POLICIES)}")
        if policy == "full":
            configs.append(CacheConfig(policy, chunk=cache.chunk))
            continue
        for window in _listed(comparison.windows, "--windows"):
            if not window.isdecimal():
                raise ConfigError(f"window {window!r} is not a whole number; --windows takes numbers and commas")
            configs.append(cache.cache_config(policy, int(window)))
    return configs


def _listed(text: str, name: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError(f"{name} is empty; give one or more, separated by commas")
    return items


def main() -> None:
    """Entry point."""
    app()
