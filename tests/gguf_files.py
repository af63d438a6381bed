"""Small GGUF files: built byte by byte, to include invalid ones, or from random models by gguf's own writer."""

import itertools
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from transformers import PreTrainedModel

from h2o_stream.models.gguf import GgufFile
from tests.gguf_metadata import metadata, rope_tables

ROW = 32
"""Size of a tensor's data: 8 numbers of 32 bits."""


class QuickReader(gguf.GGUFReader):
    """gguf's own reader without the elements of arrays, such as a vocabulary's, which take it seconds."""

    def _get_field_parts(self, start: int, kind: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if kind != GGUFValueType.ARRAY:
            return super()._get_field_parts(start, kind)
        data, (of, count) = memoryview(self.data), struct.unpack_from("<IQ", self.data, start)
        end = start + 12
        if of == GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + int.from_bytes(data[end : end + 8], "little")
        else:
            end += count * np.dtype(self.gguf_scalar_to_np[of]).itemsize
        return end - start, [self.data[start:end]], [], [GGUFValueType.ARRAY]


def string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: Any) -> bytes:
    """A key and its value; values given as bytes are written unchanged."""
    if kind == GGUFValueType.STRING:
        value = string(value)
    elif kind == GGUFValueType.UINT32 and not isinstance(value, bytes):
        value = struct.pack("<I", value)
    return string(name.encode()) + struct.pack("<I", kind) + value


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str = "a", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, count: int = -1) -> bytes:
    head = string(name.encode()) + struct.pack("<I", len(dims) if count < 0 else count)
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def composed(
    *keys: bytes,
    tensors: tuple[bytes, ...] = (),
    data: bytes = bytes(ROW),
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int = -1,
    num_keys: int = -1,
    architecture: str = "llama",
) -> bytes:
    """A file with an architecture, `keys` and `tensors`."""
    keys = (key("general.architecture", GGUFValueType.STRING, architecture.encode()), *keys)
    counts = (len(tensors) if num_tensors < 0 else num_tensors, len(keys) if num_keys < 0 else num_keys)
    head = b"".join([magic, version, struct.pack("<QQ", *counts), *keys, *tensors])
    return head + bytes(-len(head) % 32) + data


LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
TOKENS = ["<unk>", "<s>", "</s>", "Ġ", *LETTERS, "th", "the", "an", *(f"<more{i}>" for i in range(31))]
MERGES = ["t h", "th e", "a n"]


def write_model(
    path: Path,
    model: PreTrainedModel,
    arch: str,
    quantize: int | None = None,
    rope_factors: np.ndarray | None = None,
    pre: str | None = "gpt-2",
    permuted: bool = False,
    **keys: Any,
) -> None:
    """A GGUF file of a random model, as llama.cpp's converter would write it.

    Args:
        path: the file to write.
        model: the model to write.
        arch: llama.cpp's name of the architecture.
        quantize: type of the matrices; float32 if None.
        rope_factors: factors on the RoPE wavelengths, if not those of the config.
        pre: name of the pre-tokenizer; None for none.
        permuted: as of a Llama, rows of queries and keys are in the order of RoPE by adjacent pairs.
        keys: metadata of the architecture that are not those of the config.
    """
    writer = gguf.GGUFWriter(path, arch)
    add = {
        int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool,
        list: writer.add_array,
    }  # fmt: skip
    config = model.config
    for name, value in (metadata(arch, model) | keys).items():
        add[type(value)](f"{arch}.{name}", value)
    write_tokens(writer, pre)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    weights = stacked(model.state_dict())
    if arch == "gemma3n":
        weights |= unused_keys(weights, config)
    for name, weight in weights.items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            values = weight.float().numpy()
            if permuted or arch == "llama":
                values = with_adjacent_pairs(name, values, config)
            for stored_name, part in stored(arch, name, values, config, names):
                add_tensor(writer, stored_name, part, quantize)
    tables = rope_tables(model) if rope_factors is None else {"rope_freqs": rope_factors}
    for name, factors in tables.items():
        writer.add_tensor(f"{name}.weight", np.asarray(factors, np.float32))
    finish(writer)


def with_adjacent_pairs(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Rows of queries and keys in the order of RoPE by adjacent pairs; others as they are."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a model; Gemma 3n's projections between versions of the residual stream are in one tensor each."""
    numbered = {name: re.fullmatch(r"(model\.altup_\w+)\.\d+(\.weight)", name) for name in weights}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, found in numbered.items():
        if found:
            stacks.setdefault(found[1] + found[2], []).append(weights[name])
    rest = {name: weight for name, weight in weights.items() if not numbered[name]}
    return rest | {name: torch.stack(stack) for name, stack in stacks.items()}


def unused_keys(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """What published models have in layers that use keys and values of others, and llama.cpp wants to find."""
    kinds, layers = ("k_proj", "v_proj", "k_norm"), range(config.num_hidden_layers)
    parts = {kind: weights[f"model.layers.0.self_attn.{kind}.weight"] for kind in kinds}
    return {
        f"model.layers.{layer}.self_attn.{kind}.weight": parts[kind]
        for layer in layers[-config.num_kv_shared_layers :]
        for kind in kinds
    }


def write_tokens(writer: gguf.GGUFWriter, pre: str | None) -> None:
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")


IN_FULL = ("ffn_gate_inp", "exp_probs", "shortconv.conv.", "ssm_conv1d", "ssm_norm", "ssm_a", "ssm_d",
    "per_layer_model_proj", "altup", "laurel")  # fmt: skip
"""Parts of names of matrices that are not quantized."""


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, quantize: int | None) -> None:
    in_full = name.endswith(".bias") or any(part in name for part in IN_FULL)
    if quantize is None or values.ndim < 2 or in_full:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    else:
        kind = GGMLQuantizationType(quantize)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(
    arch: str, name: str, values: np.ndarray, config: Any, names: gguf.TensorNameMap
) -> Iterator[tuple[str, np.ndarray]]:
    """A weight as llama.cpp's converter writes it."""
    if arch == "gpt-oss" and ".experts." in name:
        block, suffix = f"blk.{name.split('.')[2]}", "bias" if name.endswith("_bias") else "weight"
        values = values.swapaxes(1, 2) if suffix == "weight" else values
        parts = [("down", values)] if "down_proj" in name else [("gate", values[:, ::2]), ("up", values[:, 1::2])]
        for kind, part in parts:
            yield f"{block}.ffn_{kind}_exps.{suffix}", part
        return
    if name.endswith(("router.scale", "router.per_expert_scale")):
        yield f"blk.{name.split('.')[2]}.ffn_{'down_exps' if 'per' in name else 'gate_inp'}.scale", values
        return
    if name.endswith(("sinks", "layer_scalar", "correct_output_scale")):
        yield f"{names.get_name(name)}.weight", values
        return
    if tensors := recurrent(arch, name, values, config):
        yield from ((f"blk.{name.split('.')[2]}.{inner}", part) for inner, part in tensors.items())
        return
    if name.endswith("kv_b_proj.weight"):
        heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
        keys, of_values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        for kind, part in (("k", keys.swapaxes(1, 2)), ("v", of_values)):
            yield f"blk.{name.split('.')[2]}.attn_{kind}_b.weight", part
        return
    if name.endswith("gate_up_proj"):
        block = f"blk.{name.split('.')[2]}"
        if arch == "gemma4":
            yield f"{block}.ffn_gate_up_exps.weight", values
            return
        for half, part in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"{block}.ffn_{half}_exps.weight", part
        return
    owner, suffix = (name, "weight") if name.endswith("experts.down_proj") else name.rsplit(".", 1)
    if arch in WITH_OFFSET and name.endswith("norm.weight"):
        values = values + 1
    elif name.endswith("conv.conv.weight"):
        values = values[:, 0]
    elif "shared_expert_gate" in name and arch != "qwen3next":
        values = values[0]
    stored_name = names.get_name(owner) or names.get_name(owner.replace("model.", "backbone."))
    if renamed := next((renamed for end, renamed in RENAMED.items() if name.endswith(end)), None):
        stored_name, suffix = f"blk.{name.split('.')[2]}.{renamed[0]}", renamed[1]
    yield f"{stored_name}.{suffix}", values


def recurrent(arch: str, name: str, values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """The tensors of a recurrent layer or a shared expert by their names in it; none for other weights."""
    end = name.split(".", 3)[-1] if name.startswith("model.layers.") else ""
    kind = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if end == "shared_mlp.input_linear.weight":
        return dict(zip((f"ffn_gate{kind}.weight", f"ffn_up{kind}.weight"), np.split(values, 2), strict=True))
    if end == "shared_mlp.output_linear.weight":
        return {f"ffn_down{kind}.weight": values}
    if end == "pre_ff_layernorm.weight":
        return {"ffn_norm": values}
    if not end.startswith(("mamba.", "linear_attn.", "mixer.")) or end.split(".", 1)[1] not in RECURRENT:
        return {}
    if end == "linear_attn.in_proj_qkvz.weight":
        return queries_to_gates(values, config)
    if arch.startswith("qwen35"):
        values = in_turns(end.split(".")[1], values, config)
    inner = RECURRENT[end.split(".", 1)[1]]
    if inner == "ssm_a":
        values = -np.exp(values)
    elif inner == "ssm_conv1d.weight":
        values = values[:, 0]
    if not arch.startswith("qwen3") and inner in ("ssm_a", "ssm_d"):
        values = values[:, None]
    elif not arch.startswith("qwen3") and inner == "ssm_norm.weight":
        values = values.reshape(getattr(config, "mamba_n_groups", 0) or config.n_groups, -1)
    return {inner: values}


def queries_to_gates(values: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """The tensors of queries, keys and values, and of gates, out of rows that are together for each key head."""
    size, shared = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
    by_group = values.reshape(config.linear_num_key_heads, -1, values.shape[-1])
    parts = np.split(by_group, np.cumsum([size, size, shared * config.linear_value_head_dim]), axis=1)
    query, key, value, gate = (part.reshape(-1, values.shape[-1]) for part in parts)
    return {"attn_qkv.weight": np.concatenate((query, key, value)), "attn_gate.weight": gate}


WITH_OFFSET = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next")
RECURRENT = {
    "A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias", "norm.weight": "ssm_norm.weight", "in_proj.weight": "ssm_in.weight",
    "out_proj.weight": "ssm_out.weight", "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight", "in_proj_qkvz.weight": "", "in_proj_ba.weight": "ssm_ba.weight",
}  # fmt: skip
"""Names that the converter gives to parts of recurrent layers."""


def in_turns(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Value heads in turns of their key heads, as the converter of Qwen 3.5 has them."""
    groups, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def turned(rows: np.ndarray) -> np.ndarray:
        by_group = rows.reshape(groups, heads // groups, len(rows) // heads, *rows.shape[1:])
        return by_group.swapaxes(0, 1).reshape(rows.shape)

    if name in ("in_proj_qkv", "conv1d"):
        keys = len(values) - heads * size
        return np.concatenate((values[:keys], turned(values[keys:])))
    if name == "out_proj":
        return turned(values.T).T
    return values if name == "norm" else turned(values)


RENAMED = {
    "e_score_correction_bias": ("exp_probs_b", "bias"), "block_sparse_moe.router.weight": ("ffn_gate_inp", "weight"),
    "block_sparse_moe.experts.down_proj": ("ffn_down_exps", "weight"),
    "feed_forward.experts.down_proj": ("ffn_down_exps", "weight"),
    "mixer.experts.down_proj": ("ffn_down_exps", "weight"), "mixer.experts.up_proj": ("ffn_up_exps", "weight"),
    "feed_forward.gate.weight": ("ffn_gate_inp", "weight"), "expert_bias": ("exp_probs_b", "bias"),
}  # fmt: skip
"""Names that the converter changes itself, by the end of those in transformers."""


def raw_metadata(path: Path) -> dict[str, bytes]:
    """Keys and values of a file's header as they are there, by key."""
    reader, data = GGUFReader(path), path.read_bytes()
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    sizes = {key: sum(part.nbytes for part in field.parts) for key, field in fields.items()}
    return {key: data[field.offset : field.offset + sizes[key]] for key, field in fields.items()}


def split(path: Path, folder: Path, count: int) -> list[Path]:
    """The files into which llama.cpp would split a file: all metadata are in the first."""
    file, metadata, parts = GgufFile(path), raw_metadata(path), []
    tensors = list(file.tensors.values())
    for number in range(count):
        mine = tensors[number::count]
        keys = [raw for name, raw in metadata.items() if name != "general.architecture" and not number]
        keys += [key("split.count", GGUFValueType.UINT16, struct.pack("<H", count))]
        offsets = [0, *itertools.accumulate(-(-each.nbytes // 32) * 32 for each in mine)]
        infos = tuple(
            tensor(each.name, each.shape[::-1], each.type, offset) for each, offset in zip(mine, offsets, strict=False)
        )
        data = b"".join(file.blocks(each).tobytes() + bytes(-each.nbytes % 32) for each in mine)
        parts.append(folder / f"split-{number + 1:05}-of-{count:05}.gguf")
        parts[-1].write_bytes(composed(*keys, tensors=infos, data=data, architecture=file.architecture))
    return parts
