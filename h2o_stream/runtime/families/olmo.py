"""OLMo 2 and 3, OLMoE."""

from dataclasses import replace

from h2o_stream.runtime.families.architecture import AFTER_ONLY, Architecture, ModelType

ARCHITECTURES = {
    "olmo2": replace(
        AFTER_ONLY,
        model_type=lambda parameters: "olmo3" if any(parameters.sliding) else "olmo2",
        full_every=4,
        local_plain=True,
    ),
    "olmoe": Architecture(),
}
MODEL_TYPES = {"olmoe": ModelType(ARCHITECTURES["olmoe"])}
