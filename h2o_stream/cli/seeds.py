"""Options of H2O's and StreamingLLM's repositories in their own spelling: underscores, and hints where ours differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_DEFAULT = "h2o is the default policy, leave it out; --policy full (--policies in h2o-compare) is the full cache"
_ARCHITECTURE = "the architecture is read from the model, leave it out"
_HEAVY = "use --heavy N; --window (--windows in h2o-compare) counts sinks, heavy and recent tokens together"
_PERCENT = "weights go where --device-map auto and --max-memory put them, the cache with --cache-device cpu"

_HINTS = {
    "--enable-h2o-generation": _DEFAULT,
    "--enable-h2o-cache": _DEFAULT,
    "--enable-small-cache": _DEFAULT,
    "--enable-streaming": "use --policy sink",
    "--enable-streaming-with-h2o": _DEFAULT,
    "--enable-position-rolling": "use --rolling; the default, --positions gap, goes beyond the context too",
    "--hh-size": _HEAVY,
    "--heavy-hitter-size": _HEAVY,
    "--recent-size": _HEAVY,
    "--start-size": "use --sinks N; --window (--windows in h2o-compare) counts them too",
    "--enable-start-recent-kv-cache": "use --policy sink, in h2o-compare --policies sink",
    "--enable-pos-shift": "use --rolling",
    "--num-eval-tokens": "use --tokens N in h2o-compare nll",
    "--sample-num": "use --limit N in h2o-compare summarize, --turns N in h2o-stream",
    "--model-arch": _ARCHITECTURE,
    "--model-type": _ARCHITECTURE,
    "--cache-dir": "set the environment variable HF_HOME",
    "--data-root": "MT-Bench is included; --questions FILE replays another file",
    "--hh-ratio": "use --ratio in h2o-compare throughput, --heavy-ratio and --recent-ratio elsewhere",
    "--hh-all": "h2o evicts in all layers, leave it out",
    "--gpu-batch-size": "h2o-compare throughput finds the largest batch that fits into --cache-budget",
    "--num-gpu-batches": "h2o-compare throughput finds the largest batch that fits into --cache-budget",
    "--overlap": "there is no such switch, leave it out",
    "--prompt-len": "use --shapes PROMPT+NEW in h2o-compare throughput",
    "--gen-len": "use --shapes PROMPT+NEW in h2o-compare throughput",
    "--percent": _PERCENT,
    "--task-name": "use h2o-lm-eval --tasks NAME",
    "--num-fewshot": "use h2o-lm-eval --num_fewshot N",
    "--output-path": "use --out FOLDER, or --jsonl FILE",
    "--input-path": "use --questions FILE in h2o-stream; MT-Bench is included",
}


def with_dashes(name: str) -> str:
    """An option or a choice with dashes in place of underscores."""
    return name.replace("_", "-")


def hint(arguments: Sequence[str], known: Iterable[str]) -> str:
    """What to use in place of options of the H2O repositories that a command does not have; empty without any."""
    ours = {with_dashes(name) for name in known}
    options: dict[str, list[str]] = {}
    for argument in arguments:
        if argument == "--":
            break
        name = argument.partition("=")[0]
        advice = _HINTS.get(with_dashes(name).lower())
        if advice and with_dashes(name) not in ours and name not in options.setdefault(advice, []):
            options[advice].append(name)
    return "; ".join(f"{', '.join(names)}: {advice}" for advice, names in options.items())
