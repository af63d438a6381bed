"""Describes a transformers model by inspecting its modules.

Class names are not trusted: a layer's modules must match a known layout (`layouts`), each module's function is
determined by evaluating it (`modules`), and any unknown module, parameter, hook or flag makes the model unsupported.
Code in `forward` outside of modules is invisible here, so callers verify a description by comparing logits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from h2o_stream.native import layouts
from h2o_stream.native.abi import Activation
from h2o_stream.native.altup import Versions
from h2o_stream.native.attention import Attention, with_lent_columns
from h2o_stream.native.description import (
    Description,
    DescriptionError,
    Layer,
    LayerEmbeddings,
    Matrix,
    Mlp,
    Norm,
)
from h2o_stream.native.expert_modules import experts_beside, experts_of, has_experts
from h2o_stream.native.experts import BesideMlp, Experts
from h2o_stream.native.layouts import LayerLayout, MlpLayout
from h2o_stream.native.mixer_modules import has_convolution, mixer_of
from h2o_stream.native.mixers import Mixer
from h2o_stream.native.module_reader import check_flags, has_modules
from h2o_stream.native.modules import activation_of, clamped_gates_of, embedding_scale, gate_deviations
from h2o_stream.native.multipliers import scaled_attention, scaled_mixer_output, scaled_mlp
from h2o_stream.native.pointers import dtype_name
from h2o_stream.native.residual_modules import ResidualReader
from h2o_stream.native.torch_modules import as_float32, embedding_of, matrix_of, text_modules

_NO_OPS = (nn.Dropout, nn.Identity)
"""Modules without effect in evaluation mode."""


def describe(model: Any) -> Description:
    """Describe a causal language model.

    Matrices and the embedding share the model's memory; norms and biases may be float32 copies, valid for the current
    weights.

    Raises:
        DescriptionError: the native step does not support some part of the model.
    """
    try:
        return _ModelReader(model).read()
    except RuntimeError as error:
        if all(weight.is_cpu for weight in model.parameters()):
            raise
        raise DescriptionError(f"a part of it is only evaluated on a CPU: {error}") from error


class _ModelReader(ResidualReader):
    """Reads a model top down and records which modules it has read."""

    def read(self) -> Description:
        config = self._config
        check_flags("the config", lambda flag: getattr(config, flag, None))
        check_flags("RoPE", (getattr(config, "rope_parameters", None) or {}).get)
        backbone = self._find_backbone()
        layers = list(backbone.layers)
        if len(layers) != config.num_hidden_layers:
            raise DescriptionError(f"the config has {config.num_hidden_layers} layers, the model {len(layers)}")
        embedding, rows, head = self._read_embeddings()
        positions = self._read_positions(backbone)
        norm = next((name for name in layouts.FINAL_NORMS if getattr(backbone, name, None) is not None), None)
        if norm is None:
            raise DescriptionError(f"{type(backbone).__name__} has no final norm")
        dtype = embedding.dtype if hasattr(embedding, "dtype") else embedding.weight.dtype
        final = self._norm(backbone, norm, self._hidden, "the model")
        own, versions = self._layer_embeddings(backbone), self._versions(backbone)
        output = matrix_of(head, "the output layer")
        described = self._layers(layers, own, versions)
        with_positions = positions is not None or self._rotary is not None or self._rotary_within
        if not with_positions and not any(layer.mixer for layer in described):
            raise DescriptionError(f"{type(backbone).__name__} has neither rotary nor learned positions")
        description = Description(
            layers=described,
            embedding=rows,
            embedding_scale=embedding_scale(embedding) * self._embedding_factor(),
            learned_positions=None if positions is None else as_float32(positions.weight, "the learned positions"),
            learned_offset=int(getattr(positions, "offset", 0)),
            embedding_norm=self._embedding_norm(backbone, final),
            norm=final,
            output=output,
            logit_scale=self._factor("logit_scale")
            * self._factor("lm_head_multiplier")
            / self._factor("logits_scaling"),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            residual_scale=self._residual_scale(layers),
            dtype=dtype_name(dtype),
            logits_dtype=dtype_name(getattr(head, "out_dtype", None) or dtype),
            layer_embeddings=own,
            versions=versions,
        )
        self._check_nothing_left()
        return description

    def _embedding_factor(self) -> float:
        factor = self._factor("embedding_multiplier")
        return factor * self._hidden**0.5 if getattr(self._config, "mup_enabled", None) else factor

    def _residual_scale(self, layers: list[Any]) -> float:
        """The factor on what layers add; they may say it themselves."""
        own = {layer.residual_scale for layer in layers if hasattr(layer, "residual_scale")}
        if len(own) > 1:
            raise DescriptionError("its layers have several residual scales")
        return float(own.pop()) if own else self._factor("residual_multiplier")

    def _embedding_norm(self, backbone: Any, final: Norm) -> Norm:
        """The norm of what goes into the first layer."""
        around = getattr(backbone, "embeddings", None)
        if around is not None and has_modules(around, ("tok_embeddings", "norm")):
            self._mark_container(around, "the embeddings")
            return self._norm(around, "norm", self._hidden, "the embeddings")
        return final if type(backbone).__name__ in layouts.NORMED_EMBEDDINGS else Norm()

    def _layers(self, layers: list[Any], own: LayerEmbeddings | None, versions: Versions | None) -> list[Layer]:
        described = [self._layer(layer, index, own, versions) for index, layer in enumerate(layers)]
        attentions = with_lent_columns([layer.attention for layer in described])
        return [replace(layer, attention=attention) for layer, attention in zip(described, attentions, strict=True)]

    def _read_embeddings(self) -> tuple[Any, Matrix, Any]:
        """Return the embedding module, its matrix, and the output layer."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if head is None:
            raise DescriptionError(f"{type(self._model).__name__} has no output layer")
        rows = embedding_of(embedding, "the embedding")
        if rows.columns != self._hidden:
            raise DescriptionError(f"the embedding has {rows.columns} columns, layers {self._hidden}")
        self._mark_read(*embedding.modules(), *head.modules())
        return embedding, rows, head

    def _read_positions(self, backbone: Any) -> Any:
        """Return the learned position embedding, or None if positions are rotary."""
        self._rotary = next(filter(None, (getattr(backbone, name, None) for name in layouts.ROTARY)), None)
        by_theta = list(getattr(backbone, "rotary_embs", ()))
        self._rotary_by_theta = {rotary.config.rope_parameters["rope_theta"]: rotary for rotary in by_theta}
        attentions = [getattr(layer, "self_attn", None) for layer in backbone.layers]
        self._rotary_within = all(hasattr(attention, "rotary_emb") for attention in attentions)
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
        for name in (self._model.base_model_prefix, *layouts.WITHIN):
            if not hasattr(path[-1], "layers") and isinstance(getattr(path[-1], name, None), nn.Module):
                path.append(getattr(path[-1], name))
        layers = getattr(path[-1], "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise DescriptionError(f"{type(self._model).__name__} has no list of layers")
        scales = *layouts.OWN_EMBEDDING_SCALES, layouts.OWN_EMBEDDING_OUTPUT_SCALE
        for module in path:
            self._mark_container(module, "the model", *scales)
        self._mark_read(layers)
        return path[-1]

    def _check_nothing_left(self) -> None:
        for name, module in text_modules(self._model):
            if id(module) not in self._read and not isinstance(module, _NO_OPS):
                raise DescriptionError(f"{name} is an unsupported {type(module).__name__}")

    def _layer(self, layer: Any, index: int, embeddings: LayerEmbeddings | None, versions: Versions | None) -> Layer:
        name = f"layer {index}"
        layout = _match_layout(layer, name, layouts.LAYERS)
        self._mark_container(layer, name, layouts.OUTPUT_SCALE)
        check_flags(name, lambda flag: getattr(layer, flag, None))
        mlp = layer if layout.owns_mlp else getattr(layer, layout.mlp or "", None)
        norms = {role: self._norm(layer, key, self._hidden, name) for role, key in layout.norms.items()}
        parallel = layout.parallel if layout.parallel is not None else getattr(layer, "use_parallel_residual", False)
        if has_experts(mlp) and has_modules(mlp, (layouts.AFTER_EXPERTS,)):
            norms["after_mlp"] = self._norm(mlp, layouts.AFTER_EXPERTS, self._hidden, name)
        shared = getattr(layer, layout.shared) if layout.shared else None
        described = None if mlp is None else self._feed_forward(layer, mlp, shared, name)
        scale = getattr(layer, layouts.OUTPUT_SCALE, None)
        return Layer(
            attention=self._scaled_attention(layer, layout.attention, index) if layout.attention else None,
            mixer=self._mixer(getattr(layer, layout.mixer), layer, name) if layout.mixer else None,
            mlp=described,
            **{role: norms.get(role, Norm()) for role in layouts.NORM_ROLES},
            parallel=bool(parallel),
            own_embedding=self._own_embedding(layer, name, described) if embeddings else None,
            output_scale=1.0 if scale is None else float(scale),
            altup=self._altup(layer, versions, name),
            laurel=self._laurel(layer, name),
        )

    def _scaled_attention(self, layer: Any, key: str, index: int) -> Attention:
        module = getattr(layer, key)
        return scaled_attention(self._attention(module, index), module, layer, f"the attention of layer {index}")

    def _mixer(self, module: Any, layer: Any, name: str) -> Mixer:
        self._mark_read(*module.modules())
        mixer: Any = mixer_of(module, name)
        scaled: Mixer = replace(mixer, out=scaled_mixer_output(mixer.out, layer))
        return scaled

    def _feed_forward(self, layer: Any, module: Any, shared: Any, name: str) -> Mlp | Experts:
        if has_experts(module):
            return self._experts(module, shared, name)
        mlp = self._mlp(module, name)
        return self._experts_beside(layer, name, mlp) if has_modules(layer, layouts.BESIDE_MODULES) else mlp

    def _experts(self, module: Any, shared: Any, name: str) -> Experts:
        self._mark_read(*module.modules())
        return experts_of(module, name, lambda part: self._mlp(part, f"the shared expert of {name}"), shared)

    def _experts_beside(self, layer: Any, name: str, mlp: Mlp) -> Experts:
        hidden = self._hidden
        inputs, output, own = (self._norm(layer, key, hidden, name) for key in layouts.BESIDE)
        router = self._norm(layer.router, "norm", hidden, f"the router of {name}")
        self._mark_read(*layer.router.modules(), *layer.experts.modules())
        return experts_beside(layer, name, BesideMlp(router, inputs, output, own), mlp)

    def _mlp(self, module: Any, name: str) -> Mlp:
        layouts_found = (x for x in layouts.MLPS if has_modules(module, filter(None, (x.gate, x.up, x.down))))
        layout = next(layouts_found, None)
        if layout is None:
            raise DescriptionError(f"{name} has a {type(module).__name__} where an MLP is expected")
        self._mark_container(module, name)
        up, down = self._matrix(module, layout.up, name), self._matrix(module, layout.down, name)
        gate = self._matrix(module, layout.gate, name) if layout.gate else None
        if layout.gate is None and up.rows == 2 * down.columns:
            gate, up = up.row_range(0, down.columns), up.row_range(down.columns, down.columns)
        elif layout.fused:
            raise DescriptionError(f"{name} has a {type(module).__name__} whose gates do not fit")
        activation, parameters = clamped_gates_of(module) or self._activation(module, layout, name)
        has_norm = has_modules(module, (layouts.INNER_NORM,))
        inner = self._norm(module, layouts.INNER_NORM, up.rows, name) if has_norm else Norm()
        cut = gate_deviations(getattr(module, layouts.GATE_SPARSITY, 0.0))
        return scaled_mlp(Mlp(gate, up, down, activation, parameters, inner, cut), module)

    def _activation(self, module: Any, layout: MlpLayout, name: str) -> tuple[Activation, tuple[float, ...]]:
        key = next((key for key in layouts.ACTIVATIONS if hasattr(module, key)), None)
        if layout.activation is not None and key is None:
            return layout.activation, ()
        if layout.activation is not None or key is None:
            raise DescriptionError(f"{name} has a {type(module).__name__} where an MLP is expected")
        function = getattr(module, key)
        if isinstance(function, nn.Module):
            self._mark_read(*function.modules())
        return activation_of(function, f"{key} of {name}")


def _match_layout(layer: Any, name: str, candidates: Collection[LayerLayout]) -> LayerLayout:
    """Find the layout whose modules match those of a layer exactly."""
    children = dict(layer.named_children())
    kinds = {key for key, child in children.items() if not isinstance(child, _NO_OPS)}
    optional = set[str]()
    if layouts.OWN_EMBEDDING[0] in kinds:
        optional = {*layouts.OWN_EMBEDDING, *layouts.ACTIVATIONS, layouts.ALTUP, layouts.LAUREL}
    optional |= layouts.BESIDE_MODULES if kinds >= layouts.BESIDE_MODULES else set()
    inner = {"fc1", "fc2", *layouts.ACTIVATIONS}
    named = [
        layout
        for layout in candidates
        if layout.names <= children.keys() and kinds - layout.names - optional <= (inner if layout.owns_mlp else set())
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
    latent = has_modules(module, layouts.LATENT)
    return latent or any(has_modules(module, (*layout.needed(module), layout.out)) for layout in layouts.ATTENTIONS)
