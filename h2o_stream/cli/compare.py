"""``h2o-compare``: what each policy costs and gives, on equal input."""

from __future__ import annotations

from pathlib import Path

from h2o_stream.cli import run
from h2o_stream.cli.comparisons import (
    AllOptions,
    HeavyHittersOptions,
    Make,
    NllOptions,
    RecallOptions,
    ReportOptions,
    SoakOptions,
    SpeedOptions,
    SummarizeOptions,
    TasksOptions,
    ThroughputOptions,
)
from h2o_stream.cli.options import CacheOptions, EngineOptions, ModelOptions, OutputOptions, VersionOption, takes
from h2o_stream.config import ModelConfig
from h2o_stream.processes import Processes
from h2o_stream.session.jsonl import JsonlWriter

app = run.app()


@app.callback()
def compare(version: VersionOption = False) -> None:
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
        config = model.model_config()
        _show(comparison.make(config, cache), config, comparison.out, output)


@app.command()
@takes(RecallOptions, ModelOptions, CacheOptions, OutputOptions)
def recall(comparison: RecallOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Facts planted in a stream of text and asked for later.

    Only facts that the full cache can tell are counted, so it always runs, and the stream must fit the model's context.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache), config, comparison.out, output)


@app.command()
@takes(SummarizeOptions, ModelOptions, CacheOptions, OutputOptions)
def summarize(comparison: SummarizeOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """ROUGE of the answers to summarization requests, by policy and window (extra "rouge").

    Greedy unless --sample is given. With --out (extra "plots") every prediction is kept as it is made, and an
    interrupted comparison goes on where it was.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache), config, comparison.out, output)


@app.command()
@takes(SpeedOptions, ModelOptions, EngineOptions, CacheOptions, OutputOptions)
def speed(
    comparison: SpeedOptions, model: ModelOptions, engine: EngineOptions, cache: CacheOptions, output: OutputOptions
) -> None:
    """Speed and memory at growing histories, beside other engines.

    All engines read the same text, each in a process of its own, and decode in turn, round by round; medians count.
    Each figure is also given as a part of the floor, what the memory allows: bytes of weights and cache over the
    bandwidth measured in the same run.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache, engine.engine_choice()), config, comparison.out, output)


@app.command()
@takes(ThroughputOptions, ModelOptions, EngineOptions, CacheOptions, OutputOptions)
def throughput(
    comparison: ThroughputOptions,
    model: ModelOptions,
    engine: EngineOptions,
    cache: CacheOptions,
    output: OutputOptions,
) -> None:
    """Generated tokens/s of whole batches, prompts included, the largest that fit into the same memory for the cache.

    transformers' own full cache always runs; the others are answered at its batch size, too.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache, engine.engine_choice()), config, comparison.out, output)


@app.command()
@takes(TasksOptions, ModelOptions, CacheOptions, OutputOptions)
def tasks(comparison: TasksOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions) -> None:
    """Accuracy on tasks of the lm-evaluation-harness (extra "eval").

    Contexts are read whole, then evicted, and answers are scored under eviction. h2o_facts, h2o_topics and h2o_causes
    are small tasks of our own; the harness's others need their data on this machine or the network.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache), config, comparison.out, output)


@app.command()
@takes(HeavyHittersOptions, ModelOptions, CacheOptions, OutputOptions)
def heavy_hitters(
    comparison: HeavyHittersOptions, model: ModelOptions, cache: CacheOptions, output: OutputOptions
) -> None:
    """The observations behind H2O: how sparse attention is, who gets it, how much of it each policy keeps.

    Writes a table and plots (extra "plots").
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache), config, comparison.out, output)


@app.command()
@takes(SoakOptions, ModelOptions, EngineOptions, CacheOptions, OutputOptions)
def soak(
    comparison: SoakOptions, model: ModelOptions, engine: EngineOptions, cache: CacheOptions, output: OutputOptions
) -> None:
    """One very long stream: memory, speed, loss and the cache's invariants from its beginning to its end.

    Turns of real text, and replies that the model draws. The text comes again and again, so that a drift of its loss
    would show. --model tiny is a random model of two layers, for streams of millions of tokens.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        _show(comparison.make(config, cache, engine.engine_choice()), config, comparison.out, output)


@app.command(name="all")
@takes(AllOptions, ModelOptions, EngineOptions, CacheOptions, OutputOptions)
def everything(
    comparison: AllOptions, model: ModelOptions, engine: EngineOptions, cache: CacheOptions, output: OutputOptions
) -> None:
    """nll, recall, summarize, speed and throughput, and one report of them (extras "plots" and "rouge").

    What was interrupted goes on where it was.
    """
    with run.reporting("h2o-compare", output.debug):
        config = model.model_config()
        makes = comparison.makes(config, cache, engine.engine_choice())
        output = run.speaking(output)
        with JsonlWriter(output.jsonl) as records:
            for name, make in makes.items():
                _run(make, config, comparison.out / name, output, records)
        if Processes().main:
            for name in ("report.html", "report.md"):
                _report([comparison.out], comparison.out / name, output)


@app.command()
@takes(ReportOptions, OutputOptions)
def report(comparison: ReportOptions, output: OutputOptions) -> None:
    """One page of finished comparisons: tables and charts, settings, commands and machine (extra "plots").

    HTML that needs nothing from outside, light or dark as the reader likes it; Markdown if the name ends in .md.
    """
    with run.reporting("h2o-compare", output.debug):
        _report(comparison.folders, comparison.to, output)


def _report(folders: list[Path], to: Path, output: OutputOptions) -> None:
    from h2o_stream.ui.plots import require_matplotlib
    from h2o_stream.ui.report import read_comparisons, write_report
    from h2o_stream.ui.terminal import Terminal

    require_matplotlib()
    write_report(read_comparisons(folders), to)
    Terminal(output.color, output.quiet).note(f"the report is {to}")


def _show(make: Make, model: ModelConfig, out: Path | None, output: OutputOptions) -> None:
    """Run a comparison; of several processes only the first one speaks.

    Args:
        make: imports and makes it.
        model: which it is about.
        out: its folder.
        output: where its records and words go.
    """
    output = run.speaking(output)
    with JsonlWriter(output.jsonl) as records:
        _run(make, model, out, output, records)


def _run(make: Make, model: ModelConfig, out: Path | None, output: OutputOptions, records: JsonlWriter) -> None:
    terminal = run.open_terminal(output, bars=True)
    with run.loading(model, terminal):
        from h2o_stream.ui.comparison import run_comparison

        comparison = make()
    run_comparison(comparison, out, terminal, records, Processes(together=model.tensor_parallel))


def main() -> None:
    """Entry point."""
    run.main("h2o-compare", app)
