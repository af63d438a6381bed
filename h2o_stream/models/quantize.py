"""Quantizes models to packed weights in 8 or 4 bits, through the quantizer interface of transformers.

`from_pretrained(quantization_config=PackedConfig("int4"))` packs a checkpoint while reading it, one tensor at a time.
Packed models can be saved and loaded again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from h2o_stream.errors import ConfigError
from h2o_stream.models.huge_pages import HugePageBuffer
from h2o_stream.models.packed_cache import FORMAT
from h2o_stream.models.packed_experts import split_experts
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear, TiedHead
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import columns_fit, pack, require_library, tiles_shape

METHOD = "h2o"
"""Name of the quantizer in transformers."""

_KINDS = {"int8": MatrixKind.INT8, "int4": MatrixKind.INT4}


@register_quantization_config(METHOD)
class PackedConfig(QuantizationConfigMixin):
    """Configuration of packed weights.

    Args:
        quantize: ``int8`` or ``int4``, for packing a checkpoint. Output layer and embedding always use 8 bits, because
            they are the most sensitive.
        modules: packed format by module name, for weights that are already packed.
        format: version of the packed format.

    Raises:
        ConfigError: `quantize` is unknown, or the weights are from another version.
    """

    def __init__(
        self, quantize: str = "int4", modules: Mapping[str, str] | None = None, format: int = FORMAT, **_: Any
    ) -> None:
        if quantize not in _KINDS:
            raise ConfigError(f"quantize {quantize!r} is unknown; weights are packed as one of {', '.join(_KINDS)}")
        if format != FORMAT:
            raise ConfigError(f"the packed weights have format {format}, this version reads {FORMAT}; pack them again")
        self.quant_method = METHOD
        self.quantize, self.format = quantize, format
        self.modules: dict[str, str] = dict(modules or {})


@register_quantizer(METHOD)
class PackedQuantizer(HfQuantizer):
    """Packs weights while transformers reads them, or loads packed weights."""

    quantization_config: PackedConfig
    requires_calibration = False

    def __init__(self, quantization_config: PackedConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pages = HugePageBuffer(())
        self._tied = False

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise ConfigError if there is no compiled library, or a device map is given."""
        require_library()
        if device_map is not None:
            raise ConfigError("packed weights work on the CPU only; omit --device-map, or use --quantize none")

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        config = self.quantization_config
        self.pre_quantized = bool(config.modules)
        kinds = {name: MatrixKind[kind] for name, kind in config.modules.items()} or packed_kinds(
            model, config.quantize
        )
        self._tied = untie_head(model, kinds)
        if self.pre_quantized:
            split_experts(model, set(kinds))
            for name, kind in kinds.items():
                replace_module(model, name, kind)
            return
        config.modules = {name: kind.name for name, kind in kinds.items()}
        self.pages = HugePageBuffer(
            tiles_shape(kind, *model.get_submodule(name).weight.shape) for name, kind in kinds.items()
        )

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether to pack a weight."""
        name = param_name.removesuffix(".weight")
        return name != param_name and name in self.quantization_config.modules

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that packs a weight."""
        return _PackWeight(self)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._tied:
            tie_head(model)
        return model

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradients."""
        return False

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Packed models can be saved."""
        return True


class _PackWeight(ConversionOps):
    """Packs one weight and inserts its packed module."""

    def __init__(self, quantizer: PackedQuantizer) -> None:
        self._quantizer = quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], model: Any, full_layer_name: str, missing_keys: set[str], **_: Any
    ) -> dict[str, Tensor]:
        """See `ConversionOps.convert`; returns nothing for transformers to assign."""
        value = next(iter(input_dict.values()))
        weights: Tensor = value[0] if isinstance(value, list) else value
        name = full_layer_name.removesuffix(".weight")
        config, pages = self._quantizer.quantization_config, self._quantizer.pages
        kind = MatrixKind[config.modules[name]]
        tiles = pages.take(tiles_shape(kind, *weights.shape), torch.uint8)
        replace_module(model, name, kind, pack(weights.contiguous(), kind, tiles))
        missing_keys.discard(full_layer_name)
        return {}


def packed_kinds(model: Any, quantize: str) -> dict[str, MatrixKind]:
    """Packed formats by module name, for ``int8`` or ``int4``.

    Linear layers and the embedding are packed if their columns are a multiple of 32, except for a tied output layer.
    The model may be on the meta device.
    """
    embedding, head, head_is_tied = model.get_input_embeddings(), model.get_output_embeddings(), is_tied(model)
    kinds = {}
    for name, module in model.named_modules():
        kind = MatrixKind.INT8 if module is embedding or module is head else _KINDS[quantize]
        if packable(module) and columns_fit(kind, module.weight.shape[1]) and not (module is head and head_is_tied):
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
