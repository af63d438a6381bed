"""Packs the weights of transformers models into 8 or 4 bits; packed models can be saved and loaded again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from h2o_stream.base.progress import Progress, ProgressCallback, ignore
from h2o_stream.errors import ConfigError
from h2o_stream.models.huge_pages import HugePageBuffer
from h2o_stream.models.packed_cache import FORMAT
from h2o_stream.models.packed_experts import split_experts, split_stacked_experts
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear, TiedHead
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import NOT_PACKED, columns_fit, pack, require_library, tiles_shape

METHOD = "h2o"
"""Name of the quantizer in transformers."""

_KINDS = {"int8": MatrixKind.INT8, "int4": MatrixKind.INT4}


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Which modules of a model have packed weights, and in what format each; of a version of the formats.

    Raises:
        ConfigError: the weights are from another version.
    """

    def __init__(self, modules: Mapping[str, str], format: int = FORMAT, **_: Any) -> None:
        if format != FORMAT:
            raise ConfigError(f"the packed weights have format {format}, this version reads {FORMAT}; pack them again")
        self.quant_method = METHOD
        self.format, self.modules = format, dict(modules)


@register_quantizer(METHOD)
class _PackedLoader(HfQuantizer):
    """Makes room for packed weights before transformers reads them."""

    quantization_config: PackedConfig
    is_trainable = False

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise ConfigError if there is no compiled library, or a device map is given."""
        require_library()
        if device_map is not None:
            raise ConfigError("packed weights work on the CPU only; omit --device-map, or use --quantize none")

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        kinds = {name: MatrixKind[kind] for name, kind in self.quantization_config.modules.items()}
        self._tied = untie_head(model, kinds)
        split_experts(model, set(kinds))
        for name, kind in kinds.items():
            replace_module(model, name, kind)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._tied:
            tie_head(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Packed models can be saved."""
        return True


@torch.no_grad()
def pack_model(model: Any, quantize: str, progress: ProgressCallback = ignore) -> Any:
    """Pack the weights of a model on the CPU in place, one by one, into ``int8`` or ``int4``. Returns the model.

    Embedding and output layer always use 8 bits, because they are the most sensitive. See `packed_kinds` for the rest.

    Raises:
        ConfigError: there is no compiled library, or no such format.
    """
    require_library()
    if quantize not in _KINDS:
        raise ConfigError(f"quantize {quantize!r} is unknown; weights are packed as one of {', '.join(_KINDS)}")
    weights = dict(model.named_parameters())
    split_stacked_experts(model)
    kinds = packed_kinds(model, quantize)
    tied, shapes = untie_head(model, kinds), {name: model.get_submodule(name).weight.shape for name in kinds}
    pages = HugePageBuffer(tiles_shape(kind, *shapes[name]) for name, kind in kinds.items())
    done, total = 0, sum(map(prod, shapes.values()))
    for name, kind in kinds.items():
        weight = weights.pop(name if name in weights else f"{name}.weight").view(shapes[name])
        tiles = pages.take(tiles_shape(kind, *weight.shape))
        replace_module(model, name, kind, pack(weight.contiguous(), kind, tiles))
        done += weight.numel()
        progress(Progress("packing", done, total))
    if tied:
        tie_head(model)
    model.config.quantization_config = PackedConfig({name: kind.name for name, kind in kinds.items()})
    return model


def packed_kinds(model: Any, quantize: str) -> dict[str, MatrixKind]:
    """Packed formats by module name, for ``int8`` or ``int4``.

    Linear layers and the embedding are packed if their columns are a multiple of 32, except for a tied output layer and
    for `NOT_PACKED`. The model may be on the meta device.
    """
    embedding, head, head_is_tied = model.get_input_embeddings(), model.get_output_embeddings(), is_tied(model)
    kinds = {}
    for name, module in model.named_modules():
        kind = MatrixKind.INT8 if module is embedding or module is head else _KINDS[quantize]
        stays = (module is head and head_is_tied) or not NOT_PACKED.isdisjoint(name.split("."))
        if not stays and packable(module) and columns_fit(kind, module.weight.shape[1]):
            kinds[name] = kind
    return kinds


def packed_bytes(model: Any, quantize: str) -> int:
    """Size of a model's weights after packing, including unpacked ones; see `packed_kinds`."""
    kinds = packed_kinds(model, quantize)
    weights = {name: model.get_submodule(name).weight for name in kinds}
    packed = set(map(id, weights.values()))
    unpacked: int = sum(weight.nbytes for weight in model.parameters() if id(weight) not in packed)
    return unpacked + sum(prod(tiles_shape(kind, *weights[name].shape)) for name, kind in kinds.items())


def packable(module: Any) -> bool:
    """Whether a module is a plain linear layer or an embedding with an optional scale."""
    scaled_embedding = isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")
    return type(module) in (nn.Linear, nn.Embedding) or scaled_embedding


def replace_module(model: Any, name: str, kind: MatrixKind, tiles: Tensor | None = None) -> None:
    """Replace a linear layer or an embedding by a packed one, with tiles that may be assigned later."""
    module = model.get_submodule(name)
    packed: nn.Module
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "scalar_embed_scale", 1.0)
        rows, columns = module.weight.shape
        packed = PackedEmbedding(kind, rows, columns, module.weight.dtype, scale, tiles)
    else:
        packed = PackedLinear(kind, module.in_features, module.out_features, module.bias, tiles)
        packed.out_dtype = torch.float32 if module is model.get_output_embeddings() else None
    packed._is_hf_initialized = True  # type: ignore[assignment] # or transformers would draw weights for it
    model.set_submodule(name, packed)


def is_tied(model: Any) -> bool:
    """Whether the output layer shares the weights of the embedding."""
    head = model.get_output_embeddings()
    return head is not None and f"{module_names(model)[id(head)]}.weight" in model.all_tied_weights_keys


def untie_head(model: Any, modules: Collection[str]) -> bool:
    """Remove a tied output layer until `tie_head`, if the embedding is among the modules to pack. Returns whether it
    was.
    """
    if not is_tied(model) or module_names(model)[id(model.get_input_embeddings())] not in modules:
        return False
    model.all_tied_weights_keys = {}
    model.set_output_embeddings(nn.Identity())
    return True


def tie_head(model: Any) -> None:
    """Add an output layer that shares the weights of the packed embedding."""
    model.set_output_embeddings(TiedHead(model.get_input_embeddings()))


def module_names(model: Any) -> dict[int, str]:
    """Module names by id."""
    return {id(module): name for name, module in model.named_modules()}


def set_dtype(model: Any, dtype: torch.dtype) -> None:
    """Convert unpacked weights and activations of a packed model to another dtype."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    embedding = model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        embedding.dtype = dtype
    model.config.dtype = dtype
