"""``h2o-compare``: what each policy costs and gives, on equal input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_stream.cli import run
from h2o_stream.cli.comparisons import (
    HeavyHittersOptions,
    NllOptions,
    RecallOptions,
    ReportOptions,
    SpeedOptions,
    SummarizeOptions,
    TasksOptions,
    ThroughputOptions,
    bytes_of,
    configs_of,
    listed,
    numbers_of,
    policies_of,
    shape_of,
)
from h2o_stream.cli.options import CacheOptions, CompileOptions, ModelOptions, OutputOptions, takes
from h2o_stream.config import DEFAULT_CHUNK, DEFAULT_WINDOW, AnswerConfig, CacheConfig, ModelConfig, Shape
from h2o_stream.errors import ConfigError
from h2o_stream.processes import Processes
from h2o_stream.session.records import Records
from h2o_stream.session.requests import read_requests

if TYPE_CHECKING:
    from h2o_stream.compare.comparison import Comparison

app = run.app()


@app.callback()
def compare() -> None:
    """Compare cache policies with each other and with a full cache.

    Under "accelerate launch -m h2o_stream.compare" or torchrun the processes share the work of a comparison.
    """


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
        configs = configs_of(comparison.policies, comparison.windows, comparison.seeds, cache)
        texts = [Path(text) for text in listed(comparison.text, "--text")]

        def make() -> Comparison:
            from h2o_stream.compare.nll import Nll

            return Nll(model_config, configs, texts, comparison.tokens)

        _show(make, model_config, comparison.out, output)


@app.command()
@takes(RecallOptions, ModelOptions, CacheOptions, OutputOptions)
def recall(comparison: RecallOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Facts planted in a stream of text and asked for later.

    Only facts that the full cache can tell are counted, so it always runs, and the stream must fit the model's context.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        distances = numbers_of(comparison.distances, "--distances")
        configs = configs_of(f"full,{comparison.policies}", comparison.windows, comparison.seeds, cache)

        def make() -> Comparison:
            from h2o_stream.compare.recall import Recall

            return Recall(model_config, configs, comparison.text, comparison.facts, distances)

        _show(make, model_config, comparison.out, output)


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
        configs = configs_of(comparison.policies, comparison.windows, "0", cache)
        requests = read_requests(comparison.requests, comparison.limit)
        how = AnswerConfig(comparison.prefill, comparison.sample, comparison.seed, comparison.batch)

        def make() -> Comparison:
            from h2o_stream.compare.summarize import Summarize

            return Summarize(model_config, configs, requests, comparison.requests, how)

        _show(make, model_config, comparison.out, output)


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
        histories = numbers_of(comparison.histories, "--histories")
        configs = configs_of(comparison.policies, comparison.windows, "0", cache)
        models = [
            replace(model.model_config(), dtype=dtype, quantize=quantize)
            for dtype in listed(comparison.dtypes or model.dtype, "--dtypes")
            for quantize in listed(comparison.quantizations or model.quantize, "--quantizations")
        ]
        peers = listed(comparison.peers, "--peers") if comparison.peers else []

        def make() -> Comparison:
            from h2o_stream.compare.contenders import LLAMA_CPP, OURS, PEERS, Contender
            from h2o_stream.compare.speed import Speed

            contenders = [Contender(OURS, one, config, steps.compile) for one in models for config in configs]
            for peer in peers:
                if peer not in PEERS:
                    raise ConfigError(f"peer {peer!r} is unknown; --peers takes some of {', '.join(PEERS)}")
                plain = dict.fromkeys(replace(one, quantize="none") for one in models)
                plain = dict.fromkeys([models[0]]) if peer == LLAMA_CPP else plain
                contenders += [Contender(peer, one, CacheConfig("full")) for one in plain]
            contenders = [
                replace(contender, threads=comparison.threads, random_weights=comparison.random_weights)
                for contender in contenders
            ]
            return Speed(contenders, histories, comparison.text)

        _show(make, models[0], comparison.out, output)


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
        budget = bytes_of(comparison.cache_budget, "--cache-budget")
        shapes = [shape_of(text) for text in listed(comparison.shapes, "--shapes")]

        def configs(shape: Shape) -> list[CacheConfig]:
            window = str(round(comparison.ratio * shape.length))
            return configs_of(f"full,{comparison.policies}", window, "0", cache)

        for shape in shapes:
            for config in configs(shape):
                config.plan()

        def make() -> Comparison:
            from h2o_stream.compare.throughput import Throughput

            rounds, text = comparison.rounds, comparison.text
            return Throughput(model_config, shapes, configs, budget, rounds, steps.compile, text)

        _show(make, model_config, comparison.out, output)


@app.command()
@takes(TasksOptions, ModelOptions, CacheOptions, OutputOptions)
def tasks(comparison: TasksOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Accuracy on tasks of the lm-evaluation-harness (extra "eval").

    Contexts are read whole, then evicted, and answers are scored under eviction. h2o_facts, h2o_topics and h2o_causes
    are small tasks of our own; the harness's others need their data on this machine or the network.
    """
    with run.reporting("h2o-compare", output.debug):
        model_config = model.model_config()
        cache = replace(cache, chunk=cache.chunk or 0)
        ratio = None if comparison.windows else comparison.ratio
        configs = configs_of(comparison.policies, comparison.windows or str(DEFAULT_WINDOW), "0", cache)
        names = listed(comparison.tasks, "--tasks")

        def make() -> Comparison:
            from h2o_stream.compare.tasks import Tasks

            folder, shots, limit = comparison.task_folder, comparison.shots, comparison.limit
            return Tasks(model_config, configs, names, ratio, folder, shots, limit)

        _show(make, model_config, comparison.out, output)


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
        evicting = [policy for policy in policies_of(comparison.policies) if policy != "full"]
        configs = [cache.cache_config(policy, comparison.window) for policy in evicting]
        if not configs:
            raise ConfigError("--policies names none that evicts; give one or more")

        def make() -> Comparison:
            from h2o_stream.compare.heavy_hitters import HeavyHitters

            chunk = cache.chunk or DEFAULT_CHUNK
            return HeavyHitters(model_config, configs, comparison.text, comparison.tokens, chunk)

        _show(make, model_config, comparison.out, output)


@app.command()
@takes(ReportOptions, OutputOptions)
def report(comparison: ReportOptions, output: OutputOptions) -> None:
    """One page of finished comparisons: tables and charts, settings, commands and machine (extra "plots").

    HTML that needs nothing from outside, light or dark as the reader likes it; Markdown if the name ends in .md.
    """
    with run.reporting("h2o-compare", output.debug):
        from h2o_stream.ui.plots import require_matplotlib
        from h2o_stream.ui.report import finished_in, write_report
        from h2o_stream.ui.terminal import Terminal

        require_matplotlib()
        write_report(finished_in(comparison.folders), comparison.to)
        Terminal(output.color, output.quiet).note(f"the report is {comparison.to}")


def _show(make: Callable[[], Comparison], model: ModelConfig, out: Path | None, output: OutputOptions) -> None:
    """Run a comparison; of several processes only the first one speaks.

    Args:
        make: imports and makes it.
        model: which it is about.
        out: its folder.
        output: where its records and words go.
    """
    output = run.speaking(output)
    with Records(output.jsonl) as records:
        with run.loading(model, output) as terminal:
            from h2o_stream.ui.comparison import show

            comparison = make()
        show(comparison, out, terminal, records, Processes(together=model.tensor_parallel))


def main() -> None:
    """Entry point."""
    app()
