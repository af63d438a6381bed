"""Generates under several policies with a model on one process or sharded over several. Run by test_parallel."""

import json
import sys

import torch

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment import retrieval_heads
from h2o_stream.base.processes import Processes
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load

processes = Processes()
loaded = load(ModelConfig(sys.argv[1], dtype="float32", device="cpu", tensor_parallel=processes.count > 1))

far = torch.tensor([[0.0, 0.0, 0.9, 0.0], [0.6, 0.1, 0.1, 0.5]])  # layers, KV heads
local_heads = range(processes.rank * 4 // processes.count, (processes.rank + 1) * 4 // processes.count)
retrieval_heads._attention_to_copy = lambda model, hidden_from, progress: far[:, local_heads.start : local_heads.stop]
retrieval_heads._known = lambda model, hidden_from, progress: far

ids = torch.tensor([[1, 7, 9, 4, 11, 30, 6, 5, 17, 8, 3, 21] * 4])
configs = [CacheConfig(policy, 24) for policy in ("full", "h2o", "sink")] + [CacheConfig("h2o", 24, budgets="equal")]
for config in configs:
    with attach(loaded.model, config) as cache:
        said = loaded.model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
        kept = [(cache.kept(layer)[0] >= 0).sum(-1).tolist() for layer in range(2)]
    if processes.main:
        print(json.dumps([config.policy, said.tolist(), kept]))
