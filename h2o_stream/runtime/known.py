"""Files whose description is known to be right, because it was compared with that of the transformers model.

The result is kept by digest in the user's cache folder; that of the embedded model ships.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from h2o_stream.attachment.measurements import read_measurement, save_measurement
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.models.file_identity import content_identity, model_identity
from h2o_stream.native import library

_KIND = "described"
_SHIPPED = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class Known:
    """What only the transformers model tells of a file.

    Attributes:
        digest: of the model, see `cache.identity.model_digest`.
        windows: KV heads grouped by window size, for each layer, where budgets are measured; empty if unknown.
    """

    digest: str
    windows: tuple[tuple[HeadWindow, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        windows = [[[list(window.heads), window.share] for window in layer] for layer in self.windows]
        return {"digest": self.digest, "windows": windows}

    @classmethod
    def from_json(cls, value: Any) -> Known:
        """The inverse of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is not that.
        """
        layers = (tuple(HeadWindow(tuple(heads), float(share)) for heads, share in layer) for layer in value["windows"])
        return cls(str(value["digest"]), tuple(layers))


def read_known(path: Path, dtype: str) -> Known | None:
    """What is known of a file whose vectors are in `dtype`; None if it has not been compared."""
    return _known(read_measurement(_KIND, _key(path, dtype))) or _known(
        _shipped().get(f"{content_identity(path)} {dtype}")
    )


def _known(value: Any) -> Known | None:
    with suppress(KeyError, TypeError, ValueError):
        return Known.from_json(value)
    return None


def save_known(path: Path, dtype: str, known: Known) -> None:
    """Remember what is known of a file, see `read_known`."""
    save_measurement(_KIND, _key(path, dtype), known.to_json())


def _key(path: Path, dtype: str) -> str:
    return f"{model_identity(path)} {dtype} {version('h2o-stream')} {library.identity()}"


@cache
def _shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
    return found
