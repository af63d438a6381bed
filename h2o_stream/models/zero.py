"""DeepSpeed's ZeRO-Inference: weights in host memory, gathered layer by layer. Needs the extra ``zero``."""

from __future__ import annotations

import os
from typing import Any

from h2o_stream.errors import H2OStreamError

_SINGLE_PROCESS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29531",
}


class ZeroInference:
    """Sets up ZeRO-Inference; create it before loading the model.

    Args:
        dtype: dtype of the weights.

    Raises:
        H2OStreamError: DeepSpeed is not installed.
    """

    def __init__(self, dtype: Any) -> None:
        import torch

        if not torch.accelerator.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        for name, value in _SINGLE_PROCESS.items():
            os.environ.setdefault(name, value)
        try:
            import deepspeed
        except ImportError as error:
            raise H2OStreamError(
                "--zero needs DeepSpeed; pip install --no-build-isolation 'h2o-stream[zero]'"
            ) from error
        from transformers.integrations import HfDeepSpeedConfig

        self._settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": torch.accelerator.is_available()},
                "stage3_param_persistence_threshold": 0,
            },
        }
        self._deepspeed = deepspeed
        deepspeed.init_distributed()
        self._config_handle = HfDeepSpeedConfig(self._settings)  # transformers uses it while this object is alive

    def wrap(self, model: Any) -> Any:
        """Wrap a model so that DeepSpeed gathers the weights of each layer on demand."""
        engine = self._deepspeed.initialize(model=model, config=self._settings)[0]
        engine.module.zero_inference = (engine, self._config_handle)
        return engine.module
