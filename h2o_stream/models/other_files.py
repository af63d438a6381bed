"""Files that are taken for a model and are none: what they are, and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from h2o_stream.base.texts import ARCHIVES

_START_BYTES = 512
_MAX_TEXT_BYTES = 1 << 16
_TEXTS, _MAX_TEXTS = (".json", ".jinja"), 1 << 27
_SHOWN = 40

_AGAIN = "the download failed; download the file itself, on the Hub by an address with /resolve/ in place of /blob/"
_UNPACK = "unpack it, and give what is in it"
_ENDLESS = "neither a file nor a folder, and may have no end"
_POINTER = b"version https://git-lfs.github.com"
_STARTS: Mapping[bytes, str] = {
    _POINTER: "a pointer of Git LFS, not the file itself; run git lfs pull in its folder",
    b"PK\x03\x04": f"a zip archive, or a checkpoint of torch.save; {_UNPACK}, or convert it to safetensors",
    b"\x80\x02": "a pickled checkpoint; convert it to safetensors or GGUF",
    **{start: f"{kind}; {_UNPACK}" for start, kind in ARCHIVES.items()},
    b"\x89HDF": "a checkpoint of Keras; convert it to safetensors or GGUF",
    **dict.fromkeys(
        (b"lmgg", b"fmgg", b"tjgg"), "a file of llama.cpp before GGUF; convert it, or download a newer one"
    ),
    **dict.fromkeys(
        (b"algg", b"ggla"), "an adapter (LoRA) of llama.cpp before GGUF; give the model that it belongs to"
    ),
}
"""By the first bytes."""

_WEB_PAGE = re.compile(rb"\s*+(?:(?><!--.*?-->)\s*+)*+<(?:!doctype html|html|head|\?xml)", re.I | re.S)

_HUB = re.compile(
    r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:resolve|blob|tree)/[^/]+)?(?:/(.+?))?/?(?:\?.*)?$"
)
"""Addresses of the Hub: the repository, and the file in it."""

_ENCODERS = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert",
             "eurobert", "gemma-embedding", "t5encoder")  # fmt: skip
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "an adapter (PEFT); merge it into its model, and give the result"
"""The file of adapters that are beside their model or without it, and what such a folder has."""

_TYPES: Mapping[str, str] = {
    "mmproj": "a projector (mmproj), which shows images to a model; give the model's own file, and texts only",
    "adapter": "an adapter (LoRA); merge it into its model with llama.cpp's llama-export-lora, and give the result",
    "imatrix": "an importance matrix (imatrix), by which models are quantized; give the model's own file",
    "controlvector": "a control vector; give the model's own file",
    "vocab": "a vocabulary without a model; give the model's own file",
    "encoder": "a model of embeddings, which generates no text; give a language model",
}


def describe_file(path: Path) -> str | None:
    """What a file is that is no GGUF file, and what to do; None if that is unknown."""
    if path.exists() and not path.is_file():
        return _ENDLESS
    try:
        with path.open("rb") as file:
            start, size = file.read(_START_BYTES), path.stat().st_size
    except OSError:
        return None
    if not size:
        return f"an empty file; {_AGAIN}"
    if kind := next((what for magic, what in _STARTS.items() if start.startswith(magic)), None):
        return kind
    if _WEB_PAGE.match(start):
        return f"a web page; {_AGAIN}"
    if start[8:10] in (b'{"', b"{}") and int.from_bytes(start[:8], "little") < size:
        return "a file of safetensors; give its folder, which needs a config.json, too"
    if b"blk." in start[:64] and start[:4] != b"GGUF":
        return _TYPES["imatrix"]
    return _text(start) if path.suffix == ".gguf" and size < _MAX_TEXT_BYTES else None


def _text(start: bytes) -> str | None:
    text = start.decode("utf-8", "ignore")
    if not text.isprintable() and not text.replace("\n", "").replace("\r", "").replace("\t", "").isprintable():
        return None
    shown = " ".join(text.split())
    return f"a text that begins with {shown[:_SHOWN]!r}; {_AGAIN}"


def describe_entry(path: Path) -> str | None:
    """What an entry of a folder is that no model has there, such as a pointer of Git LFS, and what to do."""
    try:
        if not path.is_file():
            return _ENDLESS if path.exists() and not path.is_dir() else None
        if path.suffix in _TEXTS and path.stat().st_size > _MAX_TEXTS:
            return f"a text of {path.stat().st_size} bytes; files of models have {_MAX_TEXTS} at most"
        if path.suffix not in (*_TEXTS, ".safetensors"):
            return None
        with path.open("rb") as file:
            return _STARTS[_POINTER] if file.read(len(_POINTER)) == _POINTER else None
    except OSError:
        return None


def describe_gguf(metadata: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """What a GGUF file is that has no language model, and what to do; None if it may have one."""
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if architecture == "clip":
        kind = "mmproj"
    elif "adapter.type" in metadata or any(name.endswith((".lora_a", ".lora_b")) for name in tensors):
        kind = "adapter"
    elif any(str(key).startswith("imatrix.") for key in metadata):
        kind = "imatrix"
    elif architecture == "controlvector":
        kind = "controlvector"
    elif architecture in _ENCODERS:
        kind = "encoder"
    elif not tensors and "tokenizer.ggml.tokens" in metadata:
        kind = "vocab"
    return _TYPES.get(str(kind))


def describe_address(name: str) -> str | None:
    """What a name is that is an address of the web, and what to do; None if it is none."""
    if not re.match(r"[a-z][a-z0-9+.-]*://", name, re.I):
        return None
    hub = _HUB.match(name)
    if hub is None:
        return "an address; download the file, and give its path"
    file = f":{hub[2]}" if hub[2] and hub[2].endswith(".gguf") else ""
    return f"an address of the Hub; give {hub[1]}{file}"
