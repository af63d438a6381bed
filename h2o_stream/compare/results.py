"""Finished parts of a comparison in a folder, so that an interrupted one goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from h2o_stream.cache.state import model_digest
from h2o_stream.cache.support import check_supported
from h2o_stream.config import CacheConfig
from h2o_stream.errors import DataError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while writing into a folder of ``--out`` into a line that names it.

    Raises:
        DataError: something could not be written.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"--out {folder}: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    """Make a folder of ``--out``, unless it is there.

    Raises:
        DataError: it cannot be made.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def identity(model: Any, config: CacheConfig) -> dict[str, Any]:
    """What a figure is a figure of: model, dtype, the policy as asked for and as this version understands it."""
    return {
        "model": model_digest(model),
        "dtype": str(model.dtype),
        "config": asdict(config),
        "plan": asdict(check_supported(type(model), model.config, config)),
        "version": version("h2o-stream"),
    }


class Results:
    """One file for each finished part, named by what it is the result of.

    Args:
        folder: where they are, made when it is not there; None keeps nothing.

    Raises:
        DataError: the folder cannot be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder and folder / "parts"
        if self._folder is not None:
            make_folder(self._folder)

    def load(self, key: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]] | None:
        """The tensor and the figures stored under `key`; None if that part is not finished, or not readable."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor("values"), json.loads(file.metadata()["figures"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None

    def store(self, key: Mapping[str, Any], values: Tensor, figures: Mapping[str, Any]) -> None:
        """Keep a finished part; it appears whole or not at all.

        Raises:
            DataError: it cannot be written.
        """
        path = self._path(key)
        if path is None:
            return
        scratch = path.with_suffix(".partial")
        try:
            save_file(
                {"values": values.contiguous()}, scratch, {"figures": json.dumps(figures), "key": json.dumps(key)}
            )
            scratch.replace(path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"--out {path}: {error}") from error

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
        return self._folder and self._folder / f"{digest}.safetensors"
