"""Models with the statistics of real ones are neither refused nor read wrongly, and wrong ones are still found."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment import verification
from h2o_stream.config import ModelConfig
from h2o_stream.models.load import load
from h2o_stream.native.describe import describe
from h2o_stream.runtime.comparison import difference
from h2o_stream.runtime.sources import ModelFile
from tests.families import FAMILIES, Family, tiny
from tests.fixtures import refusal
from tests.gguf_files import write_model
from tests.real_statistics import with_real_statistics
from tests.test_describe import OTHERS
from tests.test_runtime import MODELS
