"""The options of ``h2o-compare summarize``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from h2o_lab.summarize.requests import read_requests
from h2o_lab.summarize.rouge import require_rouge
from h2o_stream.base.options import Option
from h2o_stream.base.resources import project_file
from h2o_stream.compare.options import ComparisonOptions, InAll, Policies, Ray, Windows, configs_of
from h2o_stream.config import CacheConfig, EngineChoice
from h2o_stream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions(ComparisonOptions):
    """ROUGE of the answers to summarization requests, by policy and window (extra "rouge").

    Greedy unless --sample is given. With --out (extra "plots") every prediction is saved at once, and an interrupted
    comparison resumes.
    """

    comparison = "h2o_lab.summarize.comparison:Summarize"
    page = "h2o_lab.summarize.page:page"
    in_all = InAll(
        quick={"limit": 8, "windows": (64, 128)},
        thorough={"windows": (64, 128, 256)},
    )

    requests: Annotated[
        Path | None,
        Option(
            "Requests in JSON Lines: the cookbook's or HELM's. (default: eight of our own)",
            "--requests",
            "--input-path",
        ),
    ] = None
    policies: Policies = ("full", "sink", "h2o-paper", "h2o")
    windows: Windows = (64, 128, 256, 512, 1024)
    limit: Annotated[int | None, Option("Requests; default is all.", min=1)] = None
    prefill: Annotated[
        Literal["full", "chunked"], Option("full: evict after the prompt was read; chunked: while it is read.")
    ] = "full"
    sample: Annotated[
        bool, Option("Sample as each request says, or take the likeliest token.", "--sample/--greedy")
    ] = False
    seed: Annotated[int, Option("Random seed.", min=0)] = 0
    ray: Ray = None
    engine: EngineChoice = "auto"
    output_path: Annotated[Path | None, Option("The answers of one policy in HELM's form, requests echoed.")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_path is not None and len(self.configs) > 1:
            raise ConfigError(
                f"output_path is {self.output_path}, for {len(self.configs)} policies and windows; --output-path takes "
                "one of --policies and of --windows; --out FOLDER keeps all"
            )

    @property
    def request_file(self) -> Path:
        """The file of the requests."""
        return self.requests or project_file("data/articles/requests.jsonl")

    def check(self) -> None:
        """Also check the requests, the place for the answers, and that ROUGE is installed."""
        super().check()
        require_rouge()
        read_requests(self.request_file, self.limit)
        if self.output_path is not None and self.output_path.is_dir():
            raise ConfigError(f"--output-path {self.output_path} is a folder, it takes a file")

    @property
    def configs(self) -> list[CacheConfig]:
        """Every policy and window; with --prefill full a prompt is one chunk."""
        chunk = self.cache.get("chunk")
        if self.prefill == "full" and chunk:
            raise ConfigError(f"chunk is {chunk}, which --prefill full does not have; use --prefill chunked")
        whole = {"chunk": 0} if self.prefill == "full" else {}
        return configs_of(self.policies, self.windows, self.seeds, {**self.cache, **whole})
