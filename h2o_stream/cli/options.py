"""The options of all commands, in groups: each group makes one object, a config mostly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from h2o_stream.base.options import MAX_DIGITS, Option, json_object, parse_bytes, text_or_file
from h2o_stream.base.resources import named_prompts, replace_surrogates, version_of
from h2o_stream.cli.groups import Group, completing
from h2o_stream.config import (
    DEFAULT_CHUNK,
    DEFAULT_DRY_MULTIPLIER,
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_P,
    DTYPES,
    POLICIES,
    QUANTIZATIONS,
    CacheConfig,
    CacheDevice,
    EngineChoice,
    ModelConfig,
    RecallConfig,
    RecallMode,
    SamplingConfig,
    Settings,
)
from h2o_stream.errors import ConfigError

T = TypeVar("T")


def group_of(options: type[T], panel: str = "Comparison") -> Group[T]:
    """The options that the annotations of a dataclass declare, those of a subclass before those of its bases.

    Fields named model, cache and engine bring the options of these.
    """
    hints = get_type_hints(options, include_extras=True)
    names = dict.fromkeys(name for base in options.__mro__ for name in inspect.get_annotations(base))
    declared: dict[str, Any] = {name: meta for name in names for meta in getattr(hints[name], "__metadata__", ())}
    nested: dict[str, Any] = {name: group for name, group in _CONFIGS.items() if name in names}
    return Group(options, panel, **declared, **nested)


def _model_config(**values: Any) -> ModelConfig:
    for name in ("dtype", "quantize"):
        values[name] = values[name].lower()
    return ModelConfig(**values)


MODEL = Group(
    _model_config,
    "Model",
    like=ModelConfig,
    model=Option(
        "smollm2-135m, a Hub id, a folder, a .gguf file, repo:file.gguf or ollama:name.",
        "-m",
        "--model",
        "--model-name",
        "--model-name-or-path",
    ),
    dtype=Option(f"{', '.join(DTYPES)}; auto is the fastest safe one.", autocompletion=completing(DTYPES)),
    device=Option("auto, cpu, cuda, cuda:1, mps."),
    device_map=Option("Spread the layers with accelerate: auto, balanced, sequential."),
    max_memory=Option(
        "With --device-map: maximum on each device, as 0=10GiB,cpu=24GiB or 0=20%,cpu=80%; the rest on disk."
    ),
    tensor_parallel=Option("Split every layer among the processes of torchrun."),
    quantize=Option(
        "Weights of matrices: none, int8, int4; auto: as the file has them, or as wide as fits into memory.",
        autocompletion=completing(QUANTIZATIONS),
    ),
    offline=Option("Use only what is on this machine."),
)


def _engine(engine: EngineChoice = Settings.engine) -> EngineChoice:
    return engine


ENGINE = Group(
    _engine,
    "Model",
    engine=Option("auto: the native step where it serves the model; eager: never.", envvar="H2O_ENGINE"),
)


_AUTO = "auto"


def _cache_arguments(
    rolling: bool | None = None,
    cache_size: str | None = None,
    cache_device: CacheDevice = CacheConfig.device,
    memory: str = "off",
    **values: Any,
) -> dict[str, Any]:
    if memory.lower() not in ("off", "auto"):
        parse_bytes(memory, "--memory")
    if rolling is not None:
        positions = "rolling" if rolling else "absolute"
        if values["positions"] not in (None, positions):
            raise ConfigError(
                f"{'--rolling' if rolling else '--no-rolling'} means --positions {positions}, "
                f"but --positions {values['positions']} was given too"
            )
        values["positions"] = positions
    size = None if cache_size is None else parse_bytes(cache_size, "--cache-size")
    return {**values, "cache_size": size, "device": cache_device}


def _cache_config(
    cache: Mapping[str, Any], policy: str = CacheConfig.policy, window: str = _AUTO, **values: Any
) -> CacheConfig:
    if window.lower() != _AUTO:
        try:
            values["window"] = int(window if len(window) <= MAX_DIGITS else "")
        except ValueError as error:
            raise ConfigError(f"window is {window!r}; --window takes a number of tokens, or {_AUTO}") from error
    elif not any(cache[name] is not None for name in ("heavy", "heavy_ratio", "recent_ratio", "cache_size")):
        values["auto_window"] = 1
    return CacheConfig(policy if policy in POLICIES else policy.lower(), **values, **cache)


CACHE_ARGUMENTS = Group(
    _cache_arguments,
    "Cache",
    like=CacheConfig,
    heavy=Option("Slots for heavy hitters. (default: by policy)", "--heavy", "--num-heavy-hitter-tokens"),
    sinks=Option("First tokens never evicted. (default: by policy)"),
    decay=Option("Factor on scores per token seen. (default: by policy)"),
    positions=Option("Where RoPE sees kept tokens. (default: gap for h2o, rolling for the rest)"),
    rolling=Option("Short for --positions rolling and absolute.", "--rolling/--no-rolling"),
    span=Option("gap: distances up to this are exact. (default: what the model allows)"),
    chunk=Option(f"Prefill chunk; 0 takes the whole prompt at once. (default: {DEFAULT_CHUNK})"),
    kv_bits=Option("16, 8, 6, 4 or 2 bits per stored key and value number. (default: the model's dtype)"),
    heavy_ratio=Option("Heavy slots as a fraction of the first prompt; replaces --heavy."),
    recent_ratio=Option("Recent slots as a fraction of the first prompt; replaces --window."),
    budgets=Option("Windows of the heads: measured or equal. (default: measured for h2o, else equal)"),
    long_term=Option("h2o: weight of the long-term score. (default: by policy)"),
    cache_size=Option("Bytes of the cache, as 6MiB: chooses the window, in 6 bits; replaces --window."),
    cache_device=Option("Keys and values: where layers compute, in host memory, or in files."),
    memory=Option("Does nothing any more: larger windows keep what it kept. Scripts may still give it.", hidden=True),
)

CACHE = Group(
    _cache_config,
    "Cache",
    like=CacheConfig,
    policy=Option("", "--policy", "--mode", autocompletion=completing(lambda: POLICIES)),
    window=Option(
        "Tokens kept per layer and KV head; auto: by the model's size.",
        "--window",
        "--num-window-length",
        "--max-kv-size",
    ),
    cache=CACHE_ARGUMENTS,
)


def _sampling_config(stop: list[str] | None = None, temperature: str | None = None, **values: Any) -> SamplingConfig:
    if temperature is not None:
        temperature = str(temperature).lower()  # a session keeps the number
        with suppress(ValueError):
            values["temperature"] = float(temperature)
        values.setdefault("temperature", temperature)
    return SamplingConfig(stop=tuple(map(replace_surrogates, stop or ())), **values)


SAMPLING = Group(
    _sampling_config,
    "Sampling",
    like=SamplingConfig,
    temperature=Option(
        f"0 is greedy; h2o-stream: bench, MT-Bench's by category. (default: the model's, or {DEFAULT_TEMPERATURE})",
        "--temp",
        "--temperature",
    ),
    top_p=Option(f"Nucleus mass. (default: the model's, or {DEFAULT_TOP_P})"),
    top_k=Option("0 keeps all. (default: the model's, or 0)"),
    min_p=Option("Drop tokens below this fraction of the best one's probability. (default: the model's, or 0)"),
    repetition_penalty=Option("Above 1, tokens of the reply are repeated less often. (default: the model's, or 1)"),
    dry_multiplier=Option(
        "How much less likely a token is that lengthens a sequence of the reply; 0 is none. "
        f"(default: {DEFAULT_DRY_MULTIPLIER}; with a repetition penalty or --temp 0, 0)"
    ),
    dry_base=Option("By how much more for each further token of the sequence."),
    dry_allowed_length=Option(
        "Tokens of the shortest such sequence; 0: loops, and a little long ones. (default: the model's, or 0)"
    ),
    frequency_penalty=Option("Subtracted from a token's logit for each time that the reply has it."),
    presence_penalty=Option("Subtracted if the reply has the token at all."),
    repeat_last_n=Option("How many of the reply's last tokens penalties look at; -1 is all of them."),
    seed=Option("Random seed. (default: a new one)"),
    max_tokens=Option("Maximum tokens of a reply.", "-n", "--max-tokens"),
    stop=Option("A string that ends the reply; may be given more than once."),
)


RECALL = Option("Read evicted passages again when a message asks for them; wide: in other words, too.")


def settings_group(default_recall: RecallMode) -> Group[Settings]:
    """The options of a conversation's settings. The default of ``--recall`` is the command's."""

    def settings(
        system: str | None = None,
        system_file: Path | None = None,
        json_schema: Path | None = None,
        recall: RecallMode = default_recall,
        **values: Any,
    ) -> Settings:
        text = system if system is None else named_prompts().get(system, system)
        system = text_or_file(text, "--system", system_file, "--system-file")
        schema = None if json_schema is None else json_object(Path(json_schema), "--json-schema")
        return Settings(system=system, recall=RecallConfig(recall), json_schema=schema, **values)

    return Group(
        settings,
        "Conversation",
        like=Settings,
        system=Option(
            "System prompt, or the name of one. (default: the template's)",
            "-s",
            "--system",
            autocompletion=completing(named_prompts),
        ),
        system_file=Option("Read it from a file, or from a named one in prompts/."),
        json_schema=Option("Every reply is JSON that this file's JSON schema describes."),
        recall=RECALL,
        speculate=Option("Guess tokens from what was said before, where that is faster; replies are the same."),
        think=Option("Draw thinking as it comes, folded to a line, or not at all; off: not to think."),
        at_context=Option("Absolute positions past the model's context: continue, or stop there."),
        model=MODEL,
        engine=ENGINE,
        cache=CACHE,
        sampling=SAMPLING,
    )


_CONFIGS: dict[str, Group[Any]] = {"model": MODEL, "engine": ENGINE, "cache": CACHE_ARGUMENTS}


def list_prompts(enabled: bool) -> None:
    """Print the named prompts and exit, if the option is given."""
    if enabled:
        from h2o_stream.ui.terminal import one_line

        for name, text in named_prompts().items():
            typer.echo(f"{one_line(name):<14} {one_line(text.splitlines()[0])[:100]}")
        raise typer.Exit


def _print_version(enabled: bool) -> None:
    if enabled:
        typer.echo(f"h2o_stream {version_of('h2o-stream')}")
        raise typer.Exit


VERSION = Option("Print the version and exit.", "--version", is_eager=True, callback=_print_version)


@dataclass(frozen=True)
class OutputOptions:
    """What is written where."""

    jsonl: Annotated[str | None, Option("One JSON record a line to this file; - is stdout.")] = None
    quiet: Annotated[bool, Option("Print only replies and errors.", "-q", "--quiet")] = False
    verbose: Annotated[bool, Option("Print more details.", "-v", "--verbose")] = False
    debug: Annotated[bool, Option("Show tracebacks.")] = False
    color: Annotated[Literal["auto", "on", "off"], Option("Colours.")] = "auto"
    version: Annotated[bool, VERSION] = False


OUTPUT = group_of(OutputOptions, "Output")


def _context(context: typer.Context) -> typer.Context:
    return context


CONTEXT = Group(_context, context=None)


def sources_of(context: typer.Context) -> dict[str, tuple[Any, str]]:
    """Every option's value and its source: flag, environment, file or default."""
    names = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
    sources = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        sources[name] = (value, names.get(source.name, "default") if source else "default")
    return sources


def convert(context: typer.Context, name: str, value: Any, place: str) -> Any:
    """The value of an option as if it were typed; raises ConfigError, beginning with the place, if it cannot be."""
    option = next(parameter for parameter in context.command.params if parameter.name == name)
    try:
        return option.process_value(context, value)
    except typer.BadParameter as error:
        raise ConfigError(f"{place}: {option.opts[0]} is {value!r}; {error.message}") from error
