"""``h2o-compare speed --random-weights``: the speed of models of any shape."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from h2o_lab.random_models.gguf import check_architecture, write_random_gguf
from h2o_lab.random_models.weights import precision_of, random_model, read_settings
from h2o_stream.compare.comparison import JobProgress, Notify
from h2o_stream.compare.speed.comparison import Speed, engine_specs
from h2o_stream.compare.speed.engines import LLAMA_CPP, EngineSpec
from h2o_stream.config import CacheConfig
from h2o_stream.models.file_identity import model_identity


@dataclass(frozen=True)
class RandomSpec(EngineSpec):
    """An engine with random weights in the shape that a config of transformers has."""

    settings: str = ""

    def digest(self) -> str:
        """Identifies the settings."""
        return model_identity(Path(self.settings))

    def prepared(self, done: int, stack: ExitStack) -> Generator[JobProgress, None, EngineSpec]:
        """llama.cpp needs a GGUF file."""
        if self.engine != LLAMA_CPP:
            return self
        precision, folder = precision_of(self.model), TemporaryDirectory(prefix="h2o-stream-")
        file = Path(stack.enter_context(folder)) / f"random-{precision}.gguf"
        for written, total in write_random_gguf(read_settings(Path(self.settings)), precision, file):
            yield JobProgress(done, f"writing {file.name}: {written / 1e9:.1f} of {total / 1e9:.1f} GB")
        return replace(self, model=replace(self.model, model=str(file)))

    def load(self) -> Any:
        """The model, of transformers."""
        return random_model(Path(self.settings), self.model)

    def load_served(self) -> tuple[Any, CacheConfig]:
        """The same."""
        return self.load(), self.cache


class RandomSpeed(Speed):
    """`Speed` of a model with random weights. Tokens of the text are mapped into its vocabulary."""

    def specs(self) -> list[EngineSpec]:
        """The engines, in every precision."""
        make = partial(RandomSpec, settings=str(self.options.random_weights))
        return engine_specs(self.options, make, any_precision=True)

    def read(self, count: int, notify: Notify) -> list[int]:
        """Also check early what would fail late."""
        assert self.options.random_weights is not None
        tokens, config = super().read(count, notify), read_settings(self.options.random_weights)
        if LLAMA_CPP in self.options.peers:
            check_architecture(config)
        return [token % config.get_text_config().vocab_size for token in tokens]

    def begin(self, notify: Notify) -> dict[str, Any]:
        """See `Comparison`."""
        return {**super().begin(notify), "model": str(self.options.random_weights)}
