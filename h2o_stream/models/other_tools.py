"""Finds models of other tools: the Hub's cache, ollama's store, LM Studio's folders.

Their files are read-only and untrusted: damaged entries are skipped, and names cannot point outside of their folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_stream.base.json_text import parse_json
from h2o_stream.errors import ModelNotFoundError

OLLAMA = "ollama:"
"""Prefix of ollama models."""

_REGISTRY = "registry.ollama.ai"
_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_SAFE_PART = re.compile(r"[\w-][\w.-]*")
_LARGEST_JSON = 1 << 20
_INCOMPLETE = re.compile(r"mmproj|-\d{5}-of-\d{5}\.gguf$")
"""GGUF files that are not a complete language model: vision projectors and parts of split files."""


@dataclass(frozen=True)
class StoredModel:
    """A model on this machine: the name that --model takes, the size of its files, and the tool that stores it."""

    name: str
    nbytes: int
    source: str


def stored_models() -> list[StoredModel]:
    """Models of other tools, by tool and name."""
    return [*_hub_models(), *_ollama_models(), *_lm_studio_models()]


def ollama_file(name: str) -> Path | None:
    """The GGUF file of ``ollama:NAME[:TAG]``, with ``latest`` as the default tag; None for other names.

    Raises:
        ModelNotFoundError: ollama has no such model; the message lists its models.
    """
    if not name.startswith(OLLAMA):
        return None
    for folder, manifest in _manifests(name):
        if file := _model_layer(folder, manifest):
            return file
    names = ", ".join(model.name for model in _ollama_models()) or "it has none"
    raise ModelNotFoundError(f"ollama has no model {name.removeprefix(OLLAMA)!r} on this machine ({names})")


def ollama_layers(name: str) -> dict[str, str]:
    """What ollama keeps with the weights of ``ollama:NAME[:TAG]``, as texts by kind: ``system``, ``params``,
    ``template``, ``messages``; an adapter is there without its content. Nothing for other names.
    """
    for folder, manifest in _manifests(name) if name.startswith(OLLAMA) else ():
        if _model_layer(folder, manifest):
            files = {kind: file for kind, file in _layers(folder, manifest) if kind not in ("model", "projector")}
            return {kind: "" if kind == "adapter" else _read_layer(file) for kind, file in files.items()}
    return {}


def _read_layer(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(_LARGEST_JSON).decode("utf-8", "replace")
    except OSError:
        return ""


def _manifests(name: str) -> Iterator[tuple[Path, Path]]:
    """The folders of ollama, and where each has the manifest of a model."""
    path, _, tag = name.removeprefix(OLLAMA).partition(":")
    parts = path.split("/")
    host = parts.pop(0) if len(parts) > 2 else _REGISTRY
    if len(parts) == 1:
        parts.insert(0, "library")
    parts = [host, *parts, tag or "latest"]
    if len(parts) == 4 and all(_SAFE_PART.fullmatch(part) for part in parts):
        for folder in _ollama_folders():
            yield folder, folder.joinpath("manifests", *parts)


def read_json(path: Path) -> Any:
    """The content of a small JSON file, or None if it is unreadable."""
    try:
        with path.open("rb") as file:
            return parse_json(file.read(_LARGEST_JSON))
    except (OSError, ValueError):
        return None


def _ollama_folders() -> list[Path]:
    if folder_variable := os.environ.get("OLLAMA_MODELS"):
        return [Path(folder_variable).expanduser()]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _ollama_models() -> Iterator[StoredModel]:
    for folder in _ollama_folders():
        manifests = folder / "manifests"
        for path in sorted(manifests.glob("*/*/*/*")):
            if file := _model_layer(folder, path):
                host, owner, model, tag = path.relative_to(manifests).parts
                parts = [model] if owner == "library" else [owner, model]
                name = "/".join(parts if host == _REGISTRY else [host, owner, model])
                yield StoredModel(f"{OLLAMA}{name}:{tag}", file.stat().st_size, "ollama")


def _model_layer(folder: Path, manifest: Path) -> Path | None:
    """The weights file that a manifest refers to, or None."""
    return next((file for kind, file in _layers(folder, manifest) if kind == "model" and is_gguf(file)), None)


def _layers(folder: Path, manifest: Path) -> Iterator[tuple[str, Path]]:
    """Kinds and files of the layers of a manifest."""
    content = read_json(manifest)
    layers = content.get("layers") if isinstance(content, dict) else None
    for layer in layers if isinstance(layers, list) else []:
        kind = str(layer.get("mediaType")) if isinstance(layer, dict) else ""
        if kind.startswith(_LAYER) and (digest := _DIGEST.fullmatch(str(layer.get("digest")))):
            yield kind.removeprefix(_LAYER), folder / "blobs" / f"sha256-{digest[1]}"


def _hub_models() -> Iterator[StoredModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model":
            continue
        files = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file
            for revision in repo.revisions
            for file in revision.files
        }
        weights = {file.blob_path: file.size_on_disk for name, file in files.items() if name.endswith(".safetensors")}
        if weights and "config.json" in files:
            yield StoredModel(repo.repo_id, sum(weights.values()), "Hub")
        for name, file in sorted(files.items()):
            if name.endswith(".gguf") and not _INCOMPLETE.search(name):
                yield StoredModel(f"{repo.repo_id}:{name}", file.size_on_disk, "Hub")


def _lm_studio_models() -> Iterator[StoredModel]:
    for folder in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for path in sorted(folder.rglob("*.gguf")):
            if not _INCOMPLETE.search(path.name) and is_gguf(path):
                yield StoredModel(str(path), path.stat().st_size, "LM Studio")


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the GGUF magic number, whatever its name."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
