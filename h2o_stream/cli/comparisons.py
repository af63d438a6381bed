"""What ``h2o-compare`` can be asked, as groups of options, and how lists of them are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h2o_stream.cli.lists import bytes_of, configs_of, listed, numbers_of, policies_of, shape_of
from h2o_stream.cli.options import CacheOptions, option
from h2o_stream.config import (
    DEFAULT_CHUNK,
    DEFAULT_POLICY,
    DEFAULT_WINDOW,
    QUICK,
    THOROUGH,
    AnswerConfig,
    CacheConfig,
    EngineChoice,
    ModelConfig,
    Prefill,
    Shape,
)
from h2o_stream.errors import ConfigError
from h2o_stream.resources import cache_folder, project_file, python_manual, write_text
from h2o_stream.session.requests import read_requests

if TYPE_CHECKING:
    from h2o_stream.compare.comparison import Comparison

Make = Callable[[], "Comparison"]
"""Imports what a comparison needs, and makes it."""

_Policies = Annotated[str, option("Comparison", "--policies", help="Policies, separated by commas.")]
_Windows = Annotated[str, option("Comparison", "--windows", help="Windows, separated by commas.")]
_Seeds = Annotated[str, option("Comparison", "--seeds", help="Seeds of random, separated by commas.")]
_Text = Annotated[Path, option("Comparison", "--text", help="A text file.")]
_Out = Annotated[
    Path | None,
    option(
        "Comparison",
        "--out",
        help="Folder for settings, records, tables and plots; a comparison that was interrupted goes on there.",
    ),
]


@dataclass(frozen=True)
class NllOptions:
    """What is compared on what."""

    text: Annotated[str, option("Comparison", "--text", help="Text files, separated by commas.")]
    policies: _Policies = "full,recent,sink,h2o-paper,h2o"
    windows: _Windows = str(DEFAULT_WINDOW)
    tokens: Annotated[int, option("Comparison", "--tokens", help="Tokens predicted per text.", min=1)] = 4096
    seeds: _Seeds = "0"
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions) -> Make:
        """Check the options; the result makes the comparison."""
        configs = configs_of(self.policies, self.windows, self.seeds, cache)
        texts = [Path(text) for text in listed(self.text, "--text")]

        def make() -> Comparison:
            from h2o_stream.compare.nll import Nll

            return Nll(model, configs, texts, self.tokens)

        return make


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
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions) -> Make:
        """Check the options; the result makes the comparison."""
        distances = numbers_of(self.distances, "--distances")
        configs = configs_of(f"full,{self.policies}", self.windows, self.seeds, cache)

        def make() -> Comparison:
            from h2o_stream.compare.recall import Recall

            return Recall(model, configs, self.text, self.facts, distances)

        return make


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
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions) -> Make:
        """Check the options; the result makes the comparison."""
        if self.prefill == "full":
            if cache.chunk:
                raise ConfigError(f"chunk is {cache.chunk}, which --prefill full does not have; use --prefill chunked")
            cache = replace(cache, chunk=0)
        configs = configs_of(self.policies, self.windows, "0", cache)
        requests = read_requests(self.requests, self.limit)
        how = AnswerConfig(self.prefill, self.sample, self.seed, self.batch)

        def make() -> Comparison:
            from h2o_stream.compare.summarize import Summarize

            return Summarize(model, configs, requests, self.requests, how)

        return make


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
        option(
            "Comparison",
            "--random-weights",
            help="A config.json: that model, with random weights, made in place as --quantize says.",
        ),
    ] = None
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions, engine: EngineChoice) -> Make:
        """Check the options; the result makes the comparison."""
        histories = numbers_of(self.histories, "--histories")
        configs = configs_of(self.policies, self.windows, "0", cache)
        models = [
            replace(model, dtype=dtype, quantize=quantize)
            for dtype in listed(self.dtypes or model.dtype, "--dtypes")
            for quantize in listed(self.quantizations or model.quantize, "--quantizations")
        ]
        peers = listed(self.peers, "--peers") if self.peers else []

        def make() -> Comparison:
            from h2o_stream.compare.contenders import LLAMA_CPP, OURS, PEERS, Contender
            from h2o_stream.compare.speed import Speed

            contenders = [Contender(OURS, one, config, engine) for one in models for config in configs]
            for peer in peers:
                if peer not in PEERS:
                    raise ConfigError(f"peer {peer!r} is unknown; --peers takes some of {', '.join(PEERS)}")
                plain = dict.fromkeys(replace(one, quantize="none") for one in models)
                if peer == LLAMA_CPP:  # its file says how weights are kept
                    plain = dict.fromkeys(models if self.random_weights else models[:1])
                contenders += [Contender(peer, one, CacheConfig("full")) for one in plain]
            random = str(self.random_weights) if self.random_weights else None
            contenders = [replace(one, threads=self.threads, random_weights=random) for one in contenders]
            return Speed(contenders, histories, self.text)

        return make


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
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions, engine: EngineChoice) -> Make:
        """Check the options; the result makes the comparison."""
        budget = bytes_of(self.cache_budget, "--cache-budget")
        shapes = [shape_of(text) for text in listed(self.shapes, "--shapes")]

        def configs(shape: Shape) -> list[CacheConfig]:
            return configs_of(f"full,{self.policies}", str(round(self.ratio * shape.length)), "0", cache)

        for shape in shapes:
            for config in configs(shape):
                config.plan()

        def make() -> Comparison:
            from h2o_stream.compare.throughput import Throughput

            return Throughput(model, shapes, configs, budget, self.rounds, engine, self.text)

        return make


@dataclass(frozen=True)
class TasksOptions:
    """Which tasks, and how much of each context is kept."""

    tasks: Annotated[
        str, option("Comparison", "--tasks", help="Names of the harness's tasks, separated by commas.")
    ] = "h2o_facts,h2o_topics,h2o_causes"
    policies: _Policies = "full,recent,h2o"
    ratio: Annotated[
        float | None, option("Comparison", "--ratio", help="Windows, as a part of each context.", min=0, max=1)
    ] = 0.2
    windows: Annotated[
        str, option("Comparison", "--windows", help="Windows in tokens, separated by commas; replaces --ratio.")
    ] = ""
    task_folder: Annotated[
        Path | None, option("Comparison", "--task-folder", help="Further tasks, in the harness's form.")
    ] = None
    shots: Annotated[
        int | None, option("Comparison", "--shots", help="Examples before each question. (default: the task's)", min=0)
    ] = None
    limit: Annotated[int | None, option("Comparison", "--limit", help="Documents; default is all.", min=1)] = None
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions) -> Make:
        """Check the options; the result makes the comparison."""
        cache = replace(cache, chunk=cache.chunk or 0)
        ratio = None if self.windows else self.ratio
        configs = configs_of(self.policies, self.windows or str(DEFAULT_WINDOW), "0", cache)
        names = listed(self.tasks, "--tasks")

        def make() -> Comparison:
            from h2o_stream.compare.tasks import Tasks

            return Tasks(model, configs, names, ratio, self.task_folder, self.shots, self.limit)

        return make


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

    def make(self, model: ModelConfig, cache: CacheOptions) -> Make:
        """Check the options; the result makes the comparison."""
        evicting = [policy for policy in policies_of(self.policies) if policy != "full"]
        configs = [cache.cache_config(policy, self.window) for policy in evicting]
        if not configs:
            raise ConfigError("--policies names none that evicts; give one or more")

        def make() -> Comparison:
            from h2o_stream.compare.heavy_hitters import HeavyHitters

            return HeavyHitters(model, configs, self.text, self.tokens, cache.chunk or DEFAULT_CHUNK)

        return make


@dataclass(frozen=True)
class SoakOptions:
    """What stream, and how long."""

    text: Annotated[Path | None, option("Comparison", "--text", help="A file. (default: the manual of Python)")] = None
    tokens: Annotated[int, option("Comparison", "--tokens", help="Of the whole stream.", min=20_000)] = 200_000
    passes: Annotated[int, option("Comparison", "--passes", help="Times that the text is read.", min=2)] = 10
    policy: Annotated[str, option("Comparison", "--policy", help="Any that evicts.")] = DEFAULT_POLICY
    window: Annotated[int, option("Comparison", "--window", help="Tokens kept per layer and KV head.")] = DEFAULT_WINDOW
    out: _Out = None

    def make(self, model: ModelConfig, cache: CacheOptions, engine: EngineChoice) -> Make:
        """Check the options; the result makes the comparison."""
        config = cache.cache_config(self.policy, self.window)
        if config.policy == "full":
            raise ConfigError("--policy full keeps everything, which no memory holds for ever; give one that evicts")
        text = self.text
        if text is None:
            text = (self.out or cache_folder()) / "manual.txt"
            write_text(text, python_manual(), "--out")

        def make() -> Comparison:
            from h2o_stream.compare.soak import Soak

            return Soak(model, config, text, self.tokens, self.passes, engine, self.out)

        return make


@dataclass(frozen=True)
class AllOptions:
    """How much of everything."""

    out: Annotated[Path, option("Comparison", "--out", help="Folder for a folder of each, and for the report.")]
    quick: Annotated[bool, option("Comparison", "--quick", help="Small sizes: minutes on a laptop.")] = False
    text: Annotated[
        Path | None, option("Comparison", "--text", help="A text file. (default: the manual of Python)")
    ] = None
    requests: Annotated[
        Path | None, option("Comparison", "--requests", help="Requests in JSON Lines. (default: eight of our own)")
    ] = None

    def makes(self, model: ModelConfig, cache: CacheOptions, engine: EngineChoice) -> dict[str, Make]:
        """Check everything; the results make the comparisons, by the names of their folders.

        Raises:
            DataError: a text cannot be read, or the folder not be written.
        """
        sizes = QUICK if self.quick else THOROUGH
        text = self.text
        if text is None:
            text = self.out / "manual.txt"
            write_text(text, python_manual(), "--out")
        requests = self.requests or project_file("data/articles/requests.jsonl")
        nll = NllOptions(str(text), windows=sizes.windows, tokens=sizes.tokens)
        recall = RecallOptions(text, windows=sizes.windows, distances=sizes.distances, facts=sizes.facts)
        summarize = SummarizeOptions(requests, windows=sizes.request_windows, limit=sizes.requests)
        speed = SpeedOptions(text, histories=sizes.histories)
        throughput = ThroughputOptions(text, shapes=sizes.shapes, cache_budget=sizes.cache_budget)
        return {
            "nll": nll.make(model, cache),
            "recall": recall.make(model, cache),
            "summarize": summarize.make(model, cache),
            "speed": speed.make(model, cache, engine),
            "throughput": throughput.make(model, cache, engine),
        }


@dataclass(frozen=True)
class ReportOptions:
    """What is told where."""

    folders: Annotated[
        list[Path], typer.Argument(help="Folders of --out, or folders of such folders.", show_default=False)
    ]
    to: Annotated[Path, option("Comparison", "--to", help="The file: .html, or .md for Markdown.")] = Path(
        "report.html"
    )
