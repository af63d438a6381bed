"""Keeps the results of checks: a model that a test starts first is compared in another process, which takes 4 s."""

from collections.abc import Mapping
from pathlib import Path

from h2o_stream.runtime import checking, loading
from h2o_stream.runtime.known import Known, comparison_key, read_known

_passed: dict[str, Known] = {}


def keep_checks() -> None:
    """Let what was found right in one cache folder be known in all others; in this process."""
    vars(checking)["read_known"] = vars(loading)["read_known"] = _known


def keep(path: Path, variant: str, known: Known) -> None:
    """Let this be known in all cache folders."""
    _passed[comparison_key(path, variant)] = known


def kept_digests() -> dict[str, str]:
    """What `keep_digests` gives another process."""
    return {key: known.digest for key, known in _passed.items()}


def keep_digests(digests: Mapping[str, str]) -> None:
    """Let what another process knows be known here."""
    _passed.update({key: Known(digest) for key, digest in digests.items()})


def _known(path: Path, variant: str) -> Known | None:
    found = read_known(path, variant)
    if found is not None and found.difference:
        return found
    if found is not None:
        keep(path, variant, found)
    return _passed.get(comparison_key(path, variant))
