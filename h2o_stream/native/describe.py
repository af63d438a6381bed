"""Describes a transformers model by inspecting its modules.

Class names are not trusted: a layer's modules must match a known layout (`layouts`), each module's function is
determined by evaluating it (`modules`), and any unknown module, parameter, hook or flag makes the model unsupported.
Code in `forward` outside of modules is invisible here, so callers verify a description by comparing logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from h2o_stream.native import layouts
from h2o_stream.native.abi import dtype_name
from h2o_stream.native.description import (
    Attention,
    Description,
    DescriptionError,
    HeadOffsets,
    Layer,
    Matrix,
    Mlp,
    Norm,
    OutputGate,
    Rope,
)
from h2o_stream.native.expert_modules import experts_of, has_experts
from h2o_stream.native.experts import Experts
from h2o_stream.native.layouts import AttentionLayout, LayerLayout
from h2o_stream.native.mixer_modules import has_convolution, mixer_of
from h2o_stream.native.mixers import Mixer
from h2o_stream.native.multipliers import scaled_attention, scaled_mixer_output, scaled_mlp
from h2o_stream.native.modules import (
    activation_of,
    as_float32,
    check_module,
    embedding_of,
    embedding_scale,
    matrix_of,
    norm_of,
    rope_of,
)

_NO_OPS = (nn.Dropout, nn.Identity)
"""Modules without effect in evaluation mode."""


def describe(model: Any) -> Description:
    """Describe a causal language model.

    Matrices and the embedding share the model's memory; norms and biases may be float32 copies, valid for the current
    weights.

    Raises:
        DescriptionError: the native step does not support some part of the model.
    """
    for name, module in model.named_modules():
        check_module(name or "the model", module)
    return _ModelReader(model).read()


def _check_flags(name: str, get: Callable[[str], Any]) -> None:
    """Check that flags that change the computation have their neutral values."""
    for flag, neutral in layouts.NEUTRAL_FLAGS.items():
        value = get(flag)
        if value is not None and value not in neutral:
            raise DescriptionError(f"{name} has {flag} = {value}")


class _ModelReader:
    """Reads a model top down and records which modules it has read."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._read: set[int] = set()

    def read(self) -> Description:
        config = self._config
        _check_flags("the config", lambda flag: getattr(config, flag, None))
        _check_flags("RoPE", (getattr(config, "rope_parameters", None) or {}).get)
        backbone = self._find_backbone()
        layers = list(backbone.layers)
        if len(layers) != config.num_hidden_layers:
            raise DescriptionError(f"the config has {config.num_hidden_layers} layers, the model {len(layers)}")
        embedding, rows, head = self._read_embeddings()
        positions = self._read_positions(backbone)
        norm = next((name for name in layouts.FINAL_NORMS if getattr(backbone, name, None) is not None), None)
        if norm is None:
            raise DescriptionError(f"{type(backbone).__name__} has no final norm")
        dtype = embedding.dtype if hasattr(embedding, "tiles") else embedding.weight.dtype
        final = self._norm(backbone, norm, self._hidden, "the model")
        described = [self._layer(layer, index) for index, layer in enumerate(layers)]
        if positions is None and self._rotary is None and not any(layer.mixer for layer in described):
            raise DescriptionError(f"{type(backbone).__name__} has neither rotary nor learned positions")
        description = Description(
            layers=described,
            embedding=rows,
            embedding_scale=embedding_scale(embedding, rows, "the embedding") * self._factor("embedding_multiplier"),
            learned_positions=None if positions is None else as_float32(positions.weight, "the learned positions"),
            learned_offset=int(getattr(positions, "offset", 0)),
            embedding_norm=final if type(backbone).__name__ in layouts.NORMED_EMBEDDINGS else Norm(),
            norm=final,
            output=self._check_columns(matrix_of(head, "the output layer"), "the output layer", columns=self._hidden),
            logit_scale=self._factor("logit_scale")
            * self._factor("lm_head_multiplier")
            / self._factor("logits_scaling"),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            residual_scale=self._factor("residual_multiplier"),
            dtype=dtype_name(dtype),
            logits_dtype=dtype_name(getattr(head, "out_dtype", None) or dtype),
        )
        self._check_nothing_left()
        return description

    def _read_embeddings(self) -> tuple[Any, Matrix, Any]:
        """Return the embedding module, its matrix, and the output layer."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if head is None:
            raise DescriptionError(f"{type(self._model).__name__} has no output layer")
        rows, self._hidden = embedding_of(embedding, "the embedding"), self._config.hidden_size
        if rows.columns != self._hidden:
            raise DescriptionError(f"the embedding has {rows.columns} columns, layers {self._hidden}")
        self._mark_read(*embedding.modules(), *head.modules())
        return embedding, rows, head

    def _read_positions(self, backbone: Any) -> Any:
        """Return the learned position embedding, or None if positions are rotary."""
        self._rotary = next(filter(None, (getattr(backbone, name, None) for name in layouts.ROTARY)), None)
        by_theta = list(getattr(backbone, "rotary_embs", ()))
        self._rotary_by_theta = {rotary.config.rope_parameters["rope_theta"]: rotary for rotary in by_theta}
        positions = getattr(backbone, "embed_positions", None)
        if not isinstance(positions, nn.Embedding | None) or (positions is not None and self._rotary is not None):
            raise DescriptionError(f"{type(backbone).__name__} has learned positions of an unknown kind")
        needed = getattr(self._config, "max_position_embeddings", 0) + getattr(positions, "offset", 0), self._hidden
        if positions is not None and (positions.num_embeddings < needed[0] or positions.embedding_dim != needed[1]):
            raise DescriptionError(f"the learned positions are not {needed[0]} rows of {needed[1]}")
        self._mark_read(*(module for module in (positions, self._rotary) if module is not None))
        if by_theta:
            self._mark_read(backbone.rotary_embs, *by_theta)
        return positions

    def _find_backbone(self) -> Any:
        """Find the module that holds the layers, under the model or its base model."""
        path = [self._model]
        for name in (self._model.base_model_prefix, "decoder"):
            if not hasattr(path[-1], "layers") and isinstance(getattr(path[-1], name, None), nn.Module):
                path.append(getattr(path[-1], name))
        layers = getattr(path[-1], "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise DescriptionError(f"{type(self._model).__name__} has no list of layers")
        for module in path:
            self._mark_container(module, "the model")
        self._mark_read(layers)
        return path[-1]

    def _mark_read(self, *modules: Any) -> None:
        self._read.update(map(id, modules))

    def _check_nothing_left(self) -> None:
        for name, module in self._model.named_modules():
            if id(module) not in self._read and not isinstance(module, _NO_OPS):
                raise DescriptionError(f"{name} is an unsupported {type(module).__name__}")

    def _factor(self, name: str) -> float:
        value = getattr(self._config, name, None)
        return 1.0 if value is None else float(value)

    def _layer(self, layer: Any, index: int) -> Layer:
        name = f"layer {index}"
        layout = _match_layout(layer, name, layouts.LAYERS)
        self._mark_container(layer, name)
        _check_flags(name, lambda flag: getattr(layer, flag, None))
        mlp = layer if layout.owns_mlp else getattr(layer, layout.mlp or "", None)
        norms = {role: self._norm(layer, key, self._hidden, name) for role, key in layout.norms.items()}
        parallel = layout.parallel if layout.parallel is not None else getattr(layer, "use_parallel_residual", False)
        shared = getattr(layer, layout.shared) if layout.shared else None
        return Layer(
            attention=self._attention(getattr(layer, layout.attention), layer, index) if layout.attention else None,
            mixer=self._mixer(getattr(layer, layout.mixer), layer, name) if layout.mixer else None,
            mlp=None if mlp is None else self._feed_forward(mlp, shared, name),
            **{role: norms.get(role, Norm()) for role in layouts.NORM_ROLES},
            parallel=bool(parallel),
        )

    def _mixer(self, module: Any, layer: Any, name: str) -> Mixer:
        self._mark_read(*module.modules())
        mixer = mixer_of(module, self._hidden, name)
        return replace(mixer, out=scaled_mixer_output(mixer.out, layer))

    def _feed_forward(self, module: Any, shared: Any, name: str) -> Mlp | Experts:
        if not has_experts(module):
            return self._mlp(module, name)
        experts = self._experts(module, name)
        return experts if shared is None else replace(experts, shared=self._mlp(shared, f"the shared expert of {name}"))

    def _mark_container(self, module: Any, name: str, *known: str) -> None:
        """Record a module of which only the children and the parameters `known` are read."""
        if parameter := next((key for key in (*module._parameters, *module._buffers) if key not in known), None):
            raise DescriptionError(f"{name} has the parameter {parameter} in its {type(module).__name__}")
        self._mark_read(module)

    def _norm(self, parent: Any, key: str, size: int, name: str) -> Norm:
        module = getattr(parent, key)
        self._mark_read(module)
        return norm_of(module, size, f"{key} of {name}")

    def _matrix(self, parent: Any, key: str, name: str, columns: int = 0) -> Matrix:
        module = getattr(parent, key)
        self._mark_read(*module.modules())
        return self._check_columns(matrix_of(module, f"{key} of {name}"), f"{key} of {name}", columns)

    @staticmethod
    def _check_columns(matrix: Matrix, name: str, columns: int) -> Matrix:
        if columns and matrix.columns != columns:
            raise DescriptionError(f"{name} takes {matrix.columns} inputs instead of {columns}")
        return matrix

    def _check_rows(self, matrix: Matrix, name: str) -> None:
        if matrix.rows != self._hidden:
            raise DescriptionError(f"{name} gives {matrix.rows} outputs instead of {self._hidden}")

    def _attention(self, module: Any, layer: Any, index: int) -> Attention:
        name = f"the attention of layer {index}"
        known = (layout for layout in layouts.ATTENTIONS if _has_modules(module, (*layout.qkv, layout.out)))
        layout = max(known, key=lambda layout: _has_modules(module, layout.norms), default=None)
        if layout is None:
            raise DescriptionError(f"layer {index} has a {type(module).__name__} where an attention is expected")
        self._mark_container(module, name, layouts.SINKS)
        _check_flags(name, lambda flag: getattr(module, flag, None))
        size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if size is None or not isinstance(getattr(module, "scaling", None), float):
            raise DescriptionError(f"{name} has no head size or no scaling")
        qkv = [self._matrix(module, key, name, self._hidden) for key in layout.qkv]
        out = self._matrix(module, layout.out, name)
        self._check_rows(out, f"{layout.out} of {name}")
        heads, kv_heads, value_size, offsets = _head_layout(qkv, layout, size, out.columns, name)
        gated = _is_gated(qkv, out.columns)
        normed = [key for key in layout.norms if _has_modules(module, (key,))]
        whole = any(_weight_count(getattr(module, key)) > size for key in normed)
        sizes = dict(zip(layout.norms, (heads * size, kv_heads * size) if whole else (size, size), strict=True))
        norms = [self._norm(module, key, sizes[key], name) if key in normed else Norm() for key in layout.norms]
        attention = Attention(
            query_heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            value_size=value_size,
            scaling=module.scaling,
            softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
            qkv=qkv,
            heads=offsets,
            query_norm=norms[0],
            key_norm=norms[1],
            rope=self._rope(module, size, index, name),
            out=out,
            norms_all_heads=whole,
            norms_after_rope=layout.norms_after_rope and bool(normed),
            sink_logits=self._sinks(module, heads, name),
            gate=OutputGate(size, 2 * size) if gated else None,
        )
        return scaled_attention(attention, module, layer, name)

    def _experts(self, module: Any, name: str) -> Experts:
        self._mark_read(*module.modules())
        return experts_of(module, name, lambda shared: self._mlp(shared, f"the shared expert of {name}"))

    def _rope(self, module: Any, size: int, index: int, name: str) -> Rope | None:
        """The rotations of an attention, None if it rotates nothing."""
        kinds = getattr(self._config, "layer_types", None)
        rotary = self._rotary
        if self._rotary_by_theta:
            theta = self._config.layer_rope_theta[index]
            rotary = self._rotary_by_theta[theta] if theta else None
        if rotary is None or not layouts.rotates(module):
            return None
        rope = rope_of(rotary, kinds[index] if kinds else None, module, size, name)
        scales_queries = (getattr(self._config, "rope_parameters", None) or {}).get("llama_4_scaling_beta")
        return replace(rope, fixed=False) if scales_queries else rope

    def _sinks(self, module: Any, heads: int, name: str) -> Tensor | None:
        """The learned sinks [Hq] of an attention."""
        sinks = getattr(module, layouts.SINKS, None)
        if sinks is not None and sinks.shape != (heads,):
            raise DescriptionError(f"{name} has other learned sinks than one for each of {heads} heads")
        return as_float32(sinks, name)

    def _mlp(self, module: Any, name: str) -> Mlp:
        candidates = (mlp for mlp in layouts.MLPS if _has_modules(module, filter(None, (mlp.gate, mlp.up, mlp.down))))
        layout = next(candidates, None)
        key = next((key for key in layouts.ACTIVATIONS if hasattr(module, key)), None)
        if layout is None or (key is None) == (layout.activation is None):
            raise DescriptionError(f"{name} has a {type(module).__name__} where an MLP is expected")
        self._mark_container(module, name)
        if layout.activation is not None:
            activation = layout.activation
        else:
            assert key is not None
            function = getattr(module, key)
            self._mark_read(function)
            activation = activation_of(function, f"{key} of {name}")
        up, down = self._matrix(module, layout.up, name, self._hidden), self._matrix(module, layout.down, name)
        gate = self._matrix(module, layout.gate, name, self._hidden) if layout.gate else None
        if layout.fused:
            half = up.rows // 2
            gate, up = up.row_range(0, half), up.row_range(half, half)
        self._check_columns(down, f"{layout.down} of {name}", up.rows)
        self._check_rows(down, f"{layout.down} of {name}")
        return scaled_mlp(Mlp(gate, up, down, activation), module)


def _weight_count(module: Any) -> int:
    """How many weights a norm has; 0 without any."""
    weight = getattr(module, "weight", None)
    return 0 if weight is None else int(weight.numel())


def _has_modules(module: Any, names: Iterable[str]) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def _match_layout(layer: Any, name: str, candidates: Collection[LayerLayout]) -> LayerLayout:
    """Find the layout whose modules match those of a layer exactly."""
    kinds = {key: child for key, child in layer.named_children() if not isinstance(child, _NO_OPS)}
    inner = {"fc1", "fc2", *layouts.ACTIVATIONS}
    named = [
        layout
        for layout in candidates
        if layout.names <= kinds.keys() and kinds.keys() - layout.names <= (inner if layout.owns_mlp else set())
    ]
    for layout in named:
        if len(named) == 1 or _is_as_named(layer, layout):
            return layout
    raise DescriptionError(
        f"{name} is a {type(layer).__name__} whose modules match no known layout: {', '.join(kinds)}"
    )


def _is_as_named(layer: Any, layout: LayerLayout) -> bool:
    """Whether what a layout calls an attention or a recurrent mixer can be one, and its MLP neither."""
    mixer, attention, mlp = (getattr(layer, name or "", None) for name in (layout.mixer, layout.attention, layout.mlp))
    return (
        (mixer is None or has_convolution(mixer))
        and (attention is None or _has_projections(attention))
        and (mlp is None or not (has_convolution(mlp) or _has_projections(mlp)))
    )


def _has_projections(module: Any) -> bool:
    """Whether a module has those of an attention."""
    return any(_has_modules(module, (*layout.qkv, layout.out)) for layout in layouts.ATTENTIONS)


def _is_gated(qkv: list[Matrix], columns: int) -> bool:
    """Whether the first of three projections gives each head a query and a gate of its output [columns]."""
    return len(qkv) == 3 and qkv[0].rows == 2 * columns


def _head_layout(
    qkv: list[Matrix], layout: AttentionLayout, size: int, columns: int, name: str
) -> tuple[int, int, int, HeadOffsets]:
    """Derive query heads, KV heads, value size and offsets from the sizes of the matrices."""
    if layout.order == "interleaved":
        heads = qkv[0].rows // (3 * size)
        offsets = HeadOffsets(0, 3 * size, size, 3 * size, 2 * size, 3 * size)
        counts = heads, heads, size
        total = 3 * heads * size
    elif len(qkv) == 1:
        heads = columns // size
        kv_heads = (qkv[0].rows - columns) // (2 * size)
        offsets = HeadOffsets(0, size, columns, size, columns + kv_heads * size, size)
        counts = heads, kv_heads, size
        total = (heads + 2 * kv_heads) * size
    else:
        q, k, v = (matrix.rows for matrix in qkv)
        stride = 2 * size if _is_gated(qkv, columns) else size
        heads, kv_heads = q // stride, k // size
        value_size = v // max(1, kv_heads)
        offsets = HeadOffsets(0, stride, q, size, q + k, value_size)
        counts = heads, kv_heads, value_size
        total = heads * stride + kv_heads * (size + value_size)
    heads, kv_heads, value_size = counts
    fits = sum(matrix.rows for matrix in qkv) == total and columns == heads * value_size
    if not fits or kv_heads < 1 or heads % kv_heads:
        raise DescriptionError(f"{name} has matrices that are not a whole number of heads of size {size}")
    return heads, kv_heads, value_size, offsets
