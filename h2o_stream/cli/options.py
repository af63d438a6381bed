"""Every command-line option, once, in groups that commands share.

A group is a dataclass whose fields are typer options. `takes` turns groups into the parameters of a command
and hands the command the filled groups.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from h2o_stream.config import (
    DEFAULT_CHUNK,
    DEFAULT_MODEL,
    DEFAULT_POLICY,
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_P,
    DEFAULT_WINDOW,
    DTYPES,
    POLICIES,
    QUANTIZATIONS,
    AtContext,
    Budgets,
    CacheConfig,
    CacheDevice,
    EngineChoice,
    ModelConfig,
    Positions,
    SamplingConfig,
    Settings,
)
from h2o_stream.errors import ConfigError
from h2o_stream.resources import is_file, named_prompts, project_file, read_text, replace_surrogates


def _version(wanted: bool) -> None:
    if wanted:
        from h2o_stream import __version__

        typer.echo(f"h2o_stream {__version__}")
        raise typer.Exit


def option(panel: str, *names: str, help: str, **more: Any) -> Any:
    """A typer option under a heading of ``--help``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_envvar=False, **more)


def one_of_these(words: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What completes an option's value in a shell, from words or from what finds them then."""

    def beginning(incomplete: str) -> list[str]:
        offered = words() if callable(words) else words
        return [word for word in offered if word.startswith(incomplete) and word.isprintable()]

    return beginning


def shown_and_left(name: str, show: Callable[[bool], None], help: str) -> Any:
    """An option that shows something instead of running the command."""
    return option("Output", name, help=help, is_eager=True, callback=show)


_model = functools.partial(option, "Model")
_cache = functools.partial(option, "Cache")
_sampling = functools.partial(option, "Sampling")
_talk = functools.partial(option, "Conversation")
_output = functools.partial(option, "Output")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model."""

    model: Annotated[
        str,
        _model("-m", "--model", help="smollm2-135m, a Hub id, a folder, a .gguf file, repo:file.gguf or ollama:name."),
    ] = DEFAULT_MODEL
    dtype: Annotated[
        str,
        _model(
            "--dtype",
            help=f"{', '.join(DTYPES)}; auto is the fastest safe one.",
            autocompletion=one_of_these(DTYPES),
        ),
    ] = "auto"
    device: Annotated[str, _model("--device", help="auto, cpu, cuda, cuda:1, mps.")] = "auto"
    device_map: Annotated[
        str | None,
        _model("--device-map", help="Spread the layers with accelerate: auto, balanced, sequential."),
    ] = None
    max_memory: Annotated[
        str | None,
        _model("--max-memory", help="With --device-map: most of each device, as 0=10GiB,cpu=24GiB; the rest on disk."),
    ] = None
    tensor_parallel: Annotated[
        bool, _model("--tensor-parallel", help="Share every layer among the processes of torchrun.")
    ] = False
    zero: Annotated[
        bool, _model("--zero", help="Weights in host memory, by DeepSpeed's ZeRO-Inference (extra zero).")
    ] = False
    quantize: Annotated[
        str,
        _model(
            "--quantize",
            help="Weights of matrices: none, int8, int4; auto: as the file has them, or as wide as fits into memory.",
            autocompletion=one_of_these(QUANTIZATIONS),
        ),
    ] = "auto"
    offline: Annotated[bool, _model("--offline", help="Use only what is on this machine.")] = False

    def model_config(self) -> ModelConfig:
        """The settings behind the options."""
        return ModelConfig(
            self.model,
            self.dtype,
            self.device,
            self.device_map,
            self.offline,
            self.quantize,
            self.max_memory,
            self.tensor_parallel,
            self.zero,
        )


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What runs a decode step."""

    engine: Annotated[
        EngineChoice,
        _model("--engine", help="auto: the native step where it serves the model; eager: never.", envvar="H2O_ENGINE"),
    ] = "auto"
    compile: Annotated[
        bool | None, _model("--compile/--no-compile", help="Before version 2.", envvar="H2O_COMPILE", hidden=True)
    ] = None

    def engine_choice(self) -> EngineChoice:
        """The choice; ``--no-compile``, as it was called before, is ``--engine eager``."""
        return "eager" if self.compile is False else self.engine


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """Which policy, and how large its window is."""

    policy: Annotated[
        str,
        _cache("--policy", "--mode", help=f"{', '.join(POLICIES)}.", autocompletion=one_of_these(POLICIES)),
    ] = DEFAULT_POLICY
    window: Annotated[
        int, _cache("--window", "--num-window-length", "--max-kv-size", help="Tokens kept per layer and KV head.")
    ] = DEFAULT_WINDOW


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """The parts of a policy."""

    heavy: Annotated[
        int | None,
        _cache("--heavy", "--num-heavy-hitter-tokens", help="Slots for heavy hitters. (default: by policy)"),
    ] = None
    sinks: Annotated[int | None, _cache("--sinks", help="First tokens never evicted. (default: by policy)")] = None
    decay: Annotated[float | None, _cache("--decay", help="Factor on scores per token seen. (default: by policy)")] = (
        None
    )
    positions: Annotated[
        Positions | None,
        _cache("--positions", help="Where RoPE sees kept tokens. (default: gap for h2o, rolling for the rest)"),
    ] = None
    rolling: Annotated[
        bool | None, _cache("--rolling/--no-rolling", help="Short for --positions rolling and absolute.")
    ] = None
    span: Annotated[
        int | None,
        _cache("--span", help="gap: distances up to this are true. (default: what the model allows)"),
    ] = None
    chunk: Annotated[
        int | None,
        _cache("--chunk", help=f"Prefill chunk; 0 takes the whole prompt at once. (default: {DEFAULT_CHUNK})"),
    ] = None
    kv_bits: Annotated[
        int | None,
        _cache("--kv-bits", help="16, 8, 4 or 2 bits per stored key and value number. (default: the model's dtype)"),
    ] = None
    heavy_ratio: Annotated[
        float | None, _cache("--heavy-ratio", help="Heavy slots as a part of the first prompt; replaces --heavy.")
    ] = None
    recent_ratio: Annotated[
        float | None, _cache("--recent-ratio", help="Recent slots as a part of the first prompt; replaces --window.")
    ] = None

    budgets: Annotated[
        Budgets | None,
        _cache("--budgets", help="Windows of the heads: measured or equal. (default: measured for h2o, else equal)"),
    ] = None
    long_term: Annotated[
        float | None, _cache("--long-term", help="h2o: weight of the long-term score. (default: by policy)")
    ] = None

    cache_device: Annotated[
        CacheDevice, _cache("--cache-device", help="Keys and values: where layers compute, or in host memory.")
    ] = "auto"

    def cache_config(self, policy: str, window: int) -> CacheConfig:
        """The settings behind the options.

        Raises:
            ConfigError: see `CacheConfig`, and when --rolling and --positions contradict each other.
        """
        positions = self.positions
        if self.rolling is not None:
            short: Positions = "rolling" if self.rolling else "absolute"
            if positions not in (None, short):
                flag = "--rolling" if self.rolling else "--no-rolling"
                raise ConfigError(f"{flag} means --positions {short}, but --positions {positions} was given too")
            positions = short
        return CacheConfig(
            policy,
            window,
            self.heavy,
            self.sinks,
            self.decay,
            positions,
            self.span,
            self.chunk,
            self.kv_bits,
            self.heavy_ratio,
            self.recent_ratio,
            budgets=self.budgets,
            long_term=self.long_term,
            device=self.cache_device,
        )


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn."""

    temperature: Annotated[
        float | None,
        _sampling("--temp", "--temperature", help=f"0 is greedy. (default: the model's, or {DEFAULT_TEMPERATURE})"),
    ] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", help=f"Nucleus mass. (default: the model's, or {DEFAULT_TOP_P})")
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="0 keeps all. (default: the model's, or 0)")] = None
    min_p: Annotated[float, _sampling("--min-p", help="Drop tokens below this share of the best one.")] = 0.0
    repetition_penalty: Annotated[
        float, _sampling("--repetition-penalty", help="Above 1, tokens of this turn come less often again.")
    ] = 1.0
    seed: Annotated[int | None, _sampling("--seed", help="Of the random draws. (default: a new one)")] = None
    max_tokens: Annotated[int, _sampling("-n", "--max-tokens", help="Most tokens of a reply.")] = 512
    stop: Annotated[
        list[str] | None,
        _sampling("--stop", help="A string that ends the reply; may be given more than once."),
    ] = None

    def sampling_config(self) -> SamplingConfig:
        """The settings behind the options."""
        return SamplingConfig(
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            self.repetition_penalty,
            self.seed,
            self.max_tokens,
            tuple(map(replace_surrogates, self.stop or ())),
        )


@dataclasses.dataclass(frozen=True)
class SystemOptions:
    """The system prompt and what happens at the model's context."""

    system: Annotated[
        str | None,
        _talk(
            "-s",
            "--system",
            help="System prompt, or the name of one. (default: the template's)",
            autocompletion=one_of_these(named_prompts),
        ),
    ] = None
    system_file: Annotated[
        Path | None, _talk("--system-file", help="Read it from a file, or from a named one in prompts/.")
    ] = None
    at_context: Annotated[
        AtContext,
        _talk("--at-context", help="Original positions past the model's context: go on or end there."),
    ] = "continue"


@dataclasses.dataclass(frozen=True)
class ConversationOptions(SamplingOptions, CacheOptions, PolicyOptions, EngineOptions, ModelOptions, SystemOptions):
    """Everything a conversation needs; ``--help`` lists the bases from the last to the first."""

    def settings(self) -> Settings:
        """The checked settings behind the options.

        Raises:
            ConfigError: options are wrong or contradict each other.
            DataError: the file of the system prompt cannot be read.
        """
        return Settings(
            model=self.model_config(),
            cache=self.cache_config(self.policy, self.window),
            sampling=self.sampling_config(),
            system=one_of(_named(self.system), "--system", self.system_file, "--system-file"),
            at_context=self.at_context,
            engine=self.engine_choice(),
        )


VersionOption = Annotated[bool, shown_and_left("--version", _version, help="Print the version and leave.")]


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """What is written where."""

    jsonl: Annotated[str | None, _output("--jsonl", help="One JSON record a line to this file; - is stdout.")] = None
    quiet: Annotated[bool, _output("-q", "--quiet", help="Nothing but replies and errors.")] = False
    verbose: Annotated[bool, _output("-v", "--verbose", help="Say more about what is going on.")] = False
    debug: Annotated[bool, _output("--debug", help="Show tracebacks.")] = False
    color: Annotated[Literal["auto", "on", "off"], _output("--color", help="Colours.")] = "auto"
    version: VersionOption = False


@dataclasses.dataclass(frozen=True)
class Invocation:
    """How the command was called."""

    context: typer.Context

    def sources(self) -> dict[str, tuple[Any, str]]:
        """Every option's value, and where that is from: flag, environment, file or default."""
        words = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
        told = {}
        for name, value in self.context.params.items():
            source = self.context.get_parameter_source(name)
            told[name] = (value, words.get(source.name, "default") if source else "default")
        return told


def _named(text: str | None) -> str | None:
    """The named prompt of this name, or the text itself."""
    return text if text is None else named_prompts().get(text, text)


def one_of(text: str | None, text_option: str, file: Path | None, file_option: str) -> str | None:
    """A text that is given in one of two ways, or not at all.

    Args:
        text: the text itself.
        text_option: how it was given, for messages.
        file: a file with the text, or the name of one in prompts/.
        file_option: how that was given.

    Raises:
        ConfigError: both were given.
        DataError: the file cannot be read as UTF-8.
    """
    if file is None:
        return text if text is None else replace_surrogates(text)
    if text is not None:
        raise ConfigError(f"{text_option} and {file_option} were both given; leave one of them out")
    named = project_file("prompts") / f"{file}.txt"
    path = named if not is_file(file) and is_file(named) else file
    return read_text(path, f"{file_option} {file}").strip()


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `groups`; it is called with one filled group for each, in that order."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for group in groups:
            hints = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
                    annotation=hints[field.name],
                )
                for field in dataclasses.fields(group)
            ]

        def filled(**values: Any) -> None:
            command(*(g(**{f.name: values[f.name] for f in dataclasses.fields(g)}) for g in groups))

        filled.__name__, filled.__doc__ = command.__name__, command.__doc__
        filled.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        filled.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return filled

    return decorate
