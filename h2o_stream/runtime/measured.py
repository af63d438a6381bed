"""What was measured of files that are described without torch.

It is kept by digest in the user's cache folder; what is known of the embedded model ships.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from h2o_stream.base.measurements import read_measurement, save_measurement
from h2o_stream.base.resources import version_of
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.models.file_identity import content_identity, model_identity
from h2o_stream.native import library

Windows = Sequence[tuple[HeadWindow, ...]]
"""KV heads grouped by window size, for each layer."""

_HEADS, _ANSWERS = "heads", "answers"
"""Kinds of what is kept."""

_SHIPPED = Path(__file__).with_name("measured.json")


def shipped_digest(path: Path, variant: str) -> str:
    """What a file that ships is called in states since the first version, see `cache.identity`; nothing for others."""
    return str(_shipped(path, variant).get("digest", ""))


def read_windows(path: Path, variant: str) -> Windows:
    """The windows of the heads of a file, where budgets are measured; nothing if they have not been."""
    value = read_measurement(_HEADS, _key(path, variant)) or _shipped(path, variant).get("windows", ())
    with suppress(KeyError, TypeError, ValueError):
        return [tuple(HeadWindow(tuple(heads), float(share)) for heads, share in layer) for layer in value]
    return ()


def save_windows(path: Path, variant: str, windows: Windows) -> None:
    """Remember the windows of a file, see `read_windows`."""
    value = [[[list(window.heads), window.share] for window in layer] for layer in windows]
    save_measurement(_HEADS, _key(path, variant), value)


def read_answer_head(digest: str) -> Any:
    """The values of a model's answer head that is saved or ships, nothing if it has none; None if that is not known."""
    saved = read_measurement(_ANSWERS, _answer_key(digest))
    shipped = (one["answer_head"] for one in _all_shipped().values() if one["digest"] == digest)
    return next(shipped, None) if saved is None else saved


def save_answer_head(digest: str, head: Any) -> None:
    """Remember the answer head of a model, see `read_answer_head`."""
    save_measurement(_ANSWERS, _answer_key(digest), head)


def _answer_key(digest: str) -> str:
    return f"{digest} {version_of('h2o-stream')}"


def _key(path: Path, variant: str) -> str:
    """Everything that a measurement depends on."""
    return f"{model_identity(path)} {variant} {version_of('h2o-stream')} {library.identity()}"


def _shipped(path: Path, variant: str) -> dict[str, Any]:
    shipped: dict[str, Any] = _all_shipped().get(f"{content_identity(path)} {variant}", {})
    return shipped


@cache
def _all_shipped() -> dict[str, Any]:
    shipped: dict[str, Any] = json.loads(_SHIPPED.read_text(encoding="utf-8"))
    return shipped
