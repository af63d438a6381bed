"""Fills a full cache under an address-space limit and prints how the prefill ended. Run by test_engine."""

import resource

import psutil

from h2o_stream import CacheConfig, Engine, SamplingConfig
from h2o_stream.engine.events import Finished
from tests.fixtures import make_llama
from tests.small_talk import small_tokenizer

model = make_llama(heads=16, size=64, layers=4, vocab=1000, context=4096)
sampling = SamplingConfig(temperature=0, max_tokens=4)
with Engine(model, small_tokenizer(), CacheConfig("full"), sampling) as engine:
    list(engine.prefill(range(300)))
    list(engine.decode())
    limit = psutil.Process().memory_info().vms + (96 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for _ in range(20):
        *_, last = engine.prefill(range(1000))
        if isinstance(last, Finished):
            print(last.reason, last.detail)
            break
