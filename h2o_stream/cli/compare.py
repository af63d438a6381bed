"""``h2o-compare``: what each policy costs and gives, on equal input."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from h2o_stream.cli import run
from h2o_stream.cli.options import CacheOptions, CompileOptions, ModelOptions, OutputOptions, option, takes
from h2o_stream.config import DEFAULT_CHUNK, DEFAULT_WINDOW, POLICIES, AnswerConfig, CacheConfig, Prefill, Shape
from h2o_stream.errors import ConfigError
from h2o_stream.session.records import Records
from h2o_stream.session.requests import read_requests

app = run.app()

_Policies = Annotated[str, option("Comparison", "--policies", help="Policies, separated by commas.")]
_Windows = Annotated[str, option("Comparison", "--windows", help="Windows, separated by commas.")]
_Seeds = Annotated[str, option("Comparison", "--seeds", help="Seeds of random, separated by commas.")]


@app.callback()
def compare() -> None:
    """Compare cache policies with each other and with a full cache."""


@dataclass(frozen=True)
class NllOptions:
    """What is compared on what."""

    text: Annotated[str, option("Comparison", "--text", help="Text files, separated by commas.")]
    policies: _Policies = "full,recent,sink,h2o-paper,h2o"
    windows: _Windows = str(DEFAULT_WINDOW)
    tokens: Annotated[int, option("Comparison", "--tokens", help="Tokens predicted per text.", min=1)] = 4096
    seeds: _Seeds = "0"
    out: Annotated[
        Path | None,
        option("Comparison", "--out", help="Folder for table and plots, and for finished parts: go on where it was."),
    ] = None


@app.command()
@takes(NllOptions, ModelOptions, CacheOptions, OutputOptions)
def nll(comparison: NllOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Negative log-likelihood of long texts, streamed through each policy's cache.

    A full cache is compared inside the model's context only. The chunk is the number of tokens between two
    evictions; 1 is exactly what decoding does. With --out (extra "plots" for its plots) an interrupted comparison
    goes on where it was.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        configs = _configs(comparison.policies, comparison.windows, comparison.seeds, cache)
        texts = [Path(text) for text in _listed(comparison.text, "--text")]
        with Records(output.jsonl) as records:
            with run.loading(model_config, output) as terminal:
                from h2o_stream.ui.compare import compare_nll
            compare_nll(model_config, configs, texts, comparison.tokens, comparison.out, terminal, records)


@dataclass(frozen=True)
class RecallOptions:
    """What is planted in what."""

    text: Annotated[Path, option("Comparison", "--text", help="A text file, in which the facts are planted.")]
    policies: _Policies = "recent,sink,random,h2o-paper,h2o"
    windows: _Windows = str(DEFAULT_WINDOW)
    distances: Annotated[
        str, option("Comparison", "--distances", help="Tokens between a fact and its question, separated by commas.")
    ] = "64,256,1024,4096"
    facts: Annotated[int, option("Comparison", "--facts", help="Facts planted.", min=1)] = 20
    seeds: _Seeds = "0"
    out: Annotated[
        Path | None,
        option("Comparison", "--out", help="Folder for the table, and for finished parts: go on where it was."),
    ] = None


@app.command()
@takes(RecallOptions, ModelOptions, CacheOptions, OutputOptions)
def recall(comparison: RecallOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Facts planted in a stream of text and asked for later.

    Only facts that the full cache can tell are counted, so it always runs, and the stream must fit the model's context.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        distances = _numbers(comparison.distances, "--distances")
        policies = f"full,{comparison.policies}"
        configs = _configs(policies, comparison.windows, comparison.seeds, cache)
        with Records(output.jsonl) as records:
            with run.loading(model_config, output) as terminal:
                from h2o_stream.ui.recall import compare_recall
            compare_recall(
                model_config,
                configs,
                comparison.text,
                comparison.facts,
                distances,
                comparison.out,
                terminal,
                records,
            )


@dataclass(frozen=True)
class SummarizeOptions:
    """Who answers what, and how."""

    requests: Annotated[
        Path,
        option("Comparison", "--requests", "--input-path", help="Requests in JSON Lines: the cookbook's or HELM's."),
    ]
    policies: _Policies = "full,sink,h2o-paper,h2o"
    windows: _Windows = "64,128,256,512,1024"
    limit: Annotated[int | None, option("Comparison", "--limit", help="Requests; default is all.", min=1)] = None
    prefill: Annotated[
        Prefill,
        option("Comparison", "--prefill", help="full: compress after the prompt was read; chunked: while it is read."),
    ] = "full"
    sample: Annotated[
        bool, option("Comparison", "--sample/--greedy", help="Draw as each request says, or take the likeliest.")
    ] = False
    seed: Annotated[int, option("Comparison", "--seed", help="Of the draws.", min=0)] = 0
    batch: Annotated[int, option("Comparison", "--batch", help="Requests answered at once.", min=1)] = 8
    out: Annotated[
        Path | None,
        option("Comparison", "--out", help="Folder for table, plot and predictions: go on where it was."),
    ] = None


@app.command()
@takes(SummarizeOptions, ModelOptions, CacheOptions, OutputOptions)
def summarize(comparison: SummarizeOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """ROUGE of the answers to summarization requests, by policy and window (extra "rouge").

    Greedy unless --sample is given. With --out (extra "plots") every prediction is kept as it is made, and an
    interrupted comparison goes on where it was.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        if comparison.prefill == "full":
            if cache.chunk:
                raise ConfigError(f"chunk is {cache.chunk}, which --prefill full does not have; use --prefill chunked")
            cache = replace(cache, chunk=0)
        configs = _configs(comparison.policies, comparison.windows, "0", cache)
        requests = read_requests(comparison.requests, comparison.limit)
        with Records(output.jsonl) as records:
            with run.loading(model_config, output) as terminal:
                from h2o_stream.ui.summarize import compare_summaries
            compare_summaries(
                model_config,
                configs,
                requests,
                AnswerConfig(comparison.prefill, comparison.sample, comparison.seed, comparison.batch),
                comparison.out,
                terminal,
                records,
            )


@dataclass(frozen=True)
class SpeedOptions:
    """Who is timed where."""

    text: Annotated[Path, option("Comparison", "--text", help="A text file, read by all.")]
    policies: _Policies = "full,recent,h2o"
    windows: _Windows = str(DEFAULT_WINDOW)
    histories: Annotated[
        str, option("Comparison", "--histories", help="Tokens seen when decoding is timed, separated by commas.")
    ] = "256,1024,2048,8192"
    dtypes: Annotated[str, option("Comparison", "--dtypes", help="Instead of --dtype, separated by commas.")] = ""
    quantizations: Annotated[
        str, option("Comparison", "--quantizations", help="Instead of --quantize, separated by commas.")
    ] = ""
    peers: Annotated[
        str, option("Comparison", "--peers", help="Other engines: transformers, llama.cpp (extra bench).")
    ] = "transformers"
    threads: Annotated[int | None, option("Comparison", "--threads", help="Of all engines.", min=1)] = None
    random_weights: Annotated[
        Path | None,
        option("Comparison", "--random-weights", help="A config.json: that model, with random weights made in place."),
    ] = None
    out: Annotated[Path | None, option("Comparison", "--out", help="Folder for the table and a plot.")] = None


@app.command()
@takes(SpeedOptions, ModelOptions, CompileOptions, CacheOptions, OutputOptions)
def speed(
    comparison: SpeedOptions, model: ModelOptions, steps: CompileOptions, cache: CacheOptions, output: OutputOptions
) -> None:
    """Speed and memory at growing histories, beside other engines.

    All engines read the same text, each in a process of its own, and decode in turn, round by round; medians count,
    and what is made once (compiled steps) is made before. Each figure is also given as a part of the floor, what the
    memory allows: bytes of weights and cache over the bandwidth measured in the same run.
    """
    with run.reporting("h2o-compare", output.debug):
        histories = _numbers(comparison.histories, "--histories")
        configs = _configs(comparison.policies, comparison.windows, "0", cache)
        models = [
            replace(model.model_config(), dtype=dtype, quantize=quantize)
            for dtype in _listed(comparison.dtypes or model.dtype, "--dtypes")
            for quantize in _listed(comparison.quantizations or model.quantize, "--quantizations")
        ]
        with Records(output.jsonl) as records:
            with run.loading(models[0], output) as terminal:
                from h2o_stream.compare.contenders import LLAMA_CPP, OURS, PEERS, Contender
                from h2o_stream.ui.speed import compare_speed
            contenders = [Contender(OURS, one, config, steps.compile) for one in models for config in configs]
            for peer in _listed(comparison.peers, "--peers") if comparison.peers else ():
                if peer not in PEERS:
                    raise ConfigError(f"peer {peer!r} is unknown; --peers takes some of {', '.join(PEERS)}")
                plain = dict.fromkeys(replace(one, quantize="none") for one in models)
                plain = dict.fromkeys([models[0]]) if peer == LLAMA_CPP else plain
                contenders += [Contender(peer, one, CacheConfig("full")) for one in plain]
            contenders = [
                replace(contender, threads=comparison.threads, random_weights=comparison.random_weights)
                for contender in contenders
            ]
            compare_speed(contenders, histories, comparison.text, comparison.out, terminal, records)


@dataclass(frozen=True)
class ThroughputOptions:
    """What batches of what are answered in which memory."""

    text: Annotated[Path, option("Comparison", "--text", help="A text file, which prompts are cut from.")]
    policies: _Policies = "recent,h2o"
    shapes: Annotated[
        str, option("Comparison", "--shapes", help="Tokens of prompt + tokens generated, separated by commas.")
    ] = "512+32,512+512,512+1024"
    ratio: Annotated[
        float, option("Comparison", "--ratio", help="Windows, as a part of prompt and generated tokens.", min=0, max=1)
    ] = 0.2
    cache_budget: Annotated[
        str, option("Comparison", "--cache-budget", help="Memory for the cache of a batch: 128MiB, 2GiB.")
    ] = "2GiB"
    rounds: Annotated[
        int, option("Comparison", "--rounds", help="Times each batch is answered; medians count.", min=1)
    ] = 1
    out: Annotated[
        Path | None,
        option("Comparison", "--out", help="Folder for the table, and for finished parts: go on where it was."),
    ] = None


@app.command()
@takes(ThroughputOptions, ModelOptions, CompileOptions, CacheOptions, OutputOptions)
def throughput(
    comparison: ThroughputOptions,
    model: ModelOptions,
    steps: CompileOptions,
    cache: CacheOptions,
    output: OutputOptions,
) -> None:
    """Generated tokens/s of whole batches, prompts included, the largest that fit into the same memory for the cache.

    transformers' own full cache always runs; the others are answered at its batch size, too.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        budget = _bytes(comparison.cache_budget, "--cache-budget")
        shapes = [_shape(text) for text in _listed(comparison.shapes, "--shapes")]
        policies = f"full,{comparison.policies}"

        def configs(shape: Shape) -> list[CacheConfig]:
            return _configs(policies, str(round(comparison.ratio * shape.length)), "0", cache)

        for shape in shapes:
            for config in configs(shape):
                config.plan()
        with Records(output.jsonl) as records:
            with run.loading(model_config, output) as terminal:
                from h2o_stream.ui.throughput import compare_throughput
            compare_throughput(
                model_config,
                shapes,
                configs,
                budget,
                comparison.rounds,
                steps.compile,
                comparison.text,
                comparison.out,
                terminal,
                records,
            )


@dataclass(frozen=True)
class HeavyHittersOptions:
    """What is looked at."""

    text: Annotated[Path, option("Comparison", "--text", help="A text file.")]
    policies: _Policies = "recent,sink,random,h2o-paper,h2o"
    window: Annotated[int, option("Comparison", "--window", help="Tokens kept per layer and KV head.")] = DEFAULT_WINDOW
    tokens: Annotated[int, option("Comparison", "--tokens", help="Tokens read; within the context.", min=2)] = 2048
    out: Annotated[Path, option("Comparison", "--out", help="Folder for the table and the plots.")] = Path(
        "heavy-hitters"
    )


@app.command()
@takes(HeavyHittersOptions, ModelOptions, CacheOptions, OutputOptions)
def heavy_hitters(
    comparison: HeavyHittersOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions
) -> None:
    """The observations behind H2O: how sparse attention is, who gets it, how much of it each policy keeps.

    Writes a table and plots (extra "plots").
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        evicting = [policy for policy in _policies(comparison.policies) if policy != "full"]
        configs = [cache.cache_config(policy, comparison.window) for policy in evicting]
        if not configs:
            raise ConfigError("--policies names none that evicts; give one or more")
        with Records(output.jsonl) as records:
            with run.loading(model_config, output) as terminal:
                from h2o_stream.ui.heavy_hitters import show_heavy_hitters
                from h2o_stream.ui.plots import require_matplotlib
            require_matplotlib()
            chunk = cache.chunk or DEFAULT_CHUNK
            show_heavy_hitters(
                model_config, configs, comparison.text, comparison.tokens, chunk, comparison.out, terminal, records
            )


def _policies(text: str) -> list[str]:
    policies = _listed(text, "--policies")
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"policy {policy!r} is unknown; --policies takes some of {', '.join(POLICIES)}")
    return policies


def _configs(policies: str, windows: str, seeds_of_draws: str, cache: CacheOptions) -> list[CacheConfig]:
    """Every policy with every window and, if it draws, every seed; ``full`` comes first and once."""
    configs: list[CacheConfig] = []
    for policy in dict.fromkeys(_policies(policies)):
        if policy == "full":
            configs.append(CacheConfig(policy, chunk=cache.chunk))
            continue
        for window in _numbers(windows, "--windows"):
            seeds = _numbers(seeds_of_draws, "--seeds") if POLICIES[policy].draws else [0]
            configs += [replace(cache.cache_config(policy, window), seed=seed) for seed in seeds]
    return sorted(configs, key=lambda config: config.policy != "full")


_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(text: str, name: str) -> int:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if not size or size[2].upper() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size; {name} takes one like 128MiB or 2GiB")
    return int(float(size[1]) * _UNITS[size[2].upper()])


def _shape(text: str) -> Shape:
    prompt, _, new = text.partition("+")
    if not (prompt.isdecimal() and new.isdecimal() and int(prompt) and int(new)):
        raise ConfigError(f"{text!r} is not a shape; --shapes takes prompt and generated tokens like 512+32")
    return Shape(int(prompt), int(new))


def _numbers(text: str, name: str) -> list[int]:
    items = _listed(text, name)
    for item in items:
        if not item.isdecimal():
            raise ConfigError(f"{item!r} is not a whole number; {name} takes numbers and commas")
    return [int(item) for item in items]


def _listed(text: str, name: str) -> list[str]:
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError(f"{name} is empty; give one or more, separated by commas")
    return items


def main() -> None:
    """Entry point."""
    app()
