"""Loads the matrices of a GGUF file to a GPU in their blocks; none of them is unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from h2o_stream.gpu import available
from h2o_stream.gpu.mlps import grouped, multiply_experts, weighted_sum
from h2o_stream.gpu.packed import FEW, BlockEmbedding, BlockLinear, reads, repacked
from h2o_stream.gpu.repacking import TYPES
from h2o_stream.loading.hf_weights import HfWeights
from h2o_stream.models.packed_experts import SplitExperts, split_experts
from h2o_stream.models.quantize import METHOD, packable, untie_head
from h2o_stream.native.gguf_types import BLOCKS, TensorType

_METHOD = f"{METHOD}-blocks"

_COMPARED = 16
"""Rows of the first matrix of each type and size that are compared with what the package gguf reads."""


@register_quantization_config(_METHOD)
class BlocksConfig(QuantizationConfigMixin):
    """The modules of a model whose weights stay in blocks, and their types."""

    def __init__(self, types: Mapping[str, str], **_: Any) -> None:
        self.quant_method, self.types = _METHOD, dict(types)


@register_quantizer(_METHOD)
class _BlocksLoader(HfQuantizer):
    """Makes room for blocks before transformers reads them."""

    quantization_config: BlocksConfig
    is_trainable = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        types = self.quantization_config.types
        self._tied = untie_head(model, types)
        split_experts(model, {*types}, split=BlockExperts)
        for name, kind in types.items():
            model.set_submodule(name, _in_blocks(model.get_submodule(name), TensorType[kind]))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._tied:
            table = model.get_input_embeddings()
            model.set_output_embeddings(BlockLinear(table.blocks, table.kind, table.num_embeddings, table.columns))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Blocks are saved in their file."""
        return False


class BlockExperts(SplitExperts):
    """Experts whose matrices stay in blocks; which ones are chosen is not read on the host."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `SplitExperts`."""
        x, chosen = hidden_states.contiguous(), top_k_index.int().contiguous()
        layers: list[Any] = [layer for layer in self.children() if hasattr(layer, "blocks")]
        *first, down = (layer.matrix() for layer in layers)
        with available.on(x.device):
            pairs = grouped(chosen, self.num_experts, alone=len(x) <= FEW)
            both = torch.cat([multiply_experts([each], x, pairs, chosen.shape[1]) for each in first], -1)
            products = multiply_experts([down], self._apply_gate(both), pairs)
            return weighted_sum(products, chosen.shape[1], top_k_weights.float().contiguous())


def keep_blocks(weights: dict[str, Any], reader: HfWeights, skeleton: Any, device: torch.device) -> BlocksConfig | None:
    """Replace weights that a device reads in blocks by those.

    Args:
        weights: all weights by name, read one by one.
        reader: reads them.
        skeleton: the model on the meta device.
        device: where it will be.

    Returns:
        The config with which they are loaded; None if the device does not read all matrices of split experts.
    """
    types, readable = dict[str, str](), dict[tuple[TensorType, int], bool]()
    for name, module in skeleton.named_modules():
        weight = f"{name}.weight"
        stored = reader.blocks(weight) if packable(module) else None
        if stored is None or stored[1] not in TYPES:
            continue
        (blocks, kind), size = stored, (stored[1], module.weight.shape[1])
        if size not in readable:
            readable[size] = reads(blocks[:_COMPARED], kind, device)
        if readable[size]:
            types[name] = kind.name
            del weights[weight]
            weights[f"{name}.blocks"] = _LazyBlocks(reader, weight, device)
    experts = tuple(f"{name}." for name, module in skeleton.named_modules() if isinstance(module, SplitExperts))
    dense = {name for name, module in skeleton.named_modules() if packable(module)} - types.keys()
    return None if any(name.startswith(experts) for name in dense) else BlocksConfig(types)


class _LazyBlocks:
    """Blocks that are read on access, like a slice of safetensors, and repacked."""

    def __init__(self, reader: HfWeights, name: str, device: torch.device) -> None:
        self._reader, self._name, self._device = reader, name, device

    def __getitem__(self, index: Any) -> Tensor:
        stored = self._reader.blocks(self._name)
        assert stored
        packed = repacked(*stored, self._device)
        self._reader.release(self._name)
        return packed


def _in_blocks(module: Any, kind: TensorType) -> nn.Module:
    """A linear layer or an embedding whose blocks may be assigned later."""
    (rows, columns), (count, size) = module.weight.shape, BLOCKS[kind]
    blocks = torch.empty(rows * columns // count * size, dtype=torch.uint8, device="meta")
    made: nn.Module
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "scalar_embed_scale", 1.0)
        made = BlockEmbedding(blocks, kind, rows, columns, module.weight.dtype, scale)
    else:
        made = BlockLinear(blocks, kind, rows, columns, module.bias)
    made._is_hf_initialized = True  # type: ignore[assignment] # or transformers would draw weights for it
    return made
