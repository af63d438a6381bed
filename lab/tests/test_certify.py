"""``h2o-compare certify`` compares what we read of a file with what transformers reads."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from h2o_lab.certify import CertifyOptions, certify
from h2o_stream.config import ModelConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.transformers_model import load
from h2o_stream.runtime import file_ropes
from h2o_stream.runtime.model import RuntimeModel
from tests import test_first_start
from tests.commands import invoke
from tests.family_models import written
from tests.test_runtime import keep_all

file, loaded, DTYPE = test_first_start.file, test_first_start.loaded, test_first_start.DTYPE


def test_what_is_right(file: Path) -> None:
    assert certify(CertifyOptions(str(file), ModelConfig(dtype=DTYPE)), print) == []


def test_a_wrong_base_of_rope_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = file_ropes.scaled_rope
    wrong = {"rope_theta": 10.0}
    monkeypatch.setattr(file_ropes, "scaled_rope", lambda rope, *sizes: right({**rope, **wrong}, *sizes))
    done = invoke("h2o-compare", "certify", file, "--dtype", DTYPE, "--jsonl", "-")
    assert done.exit_code == 1
    assert "logits are off" in done.stderr
    (record,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert record["model"] == str(file)
    assert "logits are off" in record["differences"][0]


def test_tokens_that_differ_are_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them are called special is no difference."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        rules = json.loads(loaded.tokenizer.backend_tokenizer.to_str())
        for token in rules["added_tokens"]:
            token["special"] = not token["special"]
        loaded.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules | normalizer))
        return loaded

    monkeypatch.setattr("h2o_stream.loading.transformers_model.load", changed)
    options = CertifyOptions(str(file), ModelConfig(dtype=DTYPE))
    normalizer = dict[str, Any]()
    assert certify(options, print) == []
    normalizer["normalizer"] = {"type": "Lowercase"}
    assert certify(options, print) == ["the tokenizers differ: normalizer"]


@pytest.mark.parametrize("name", ["Qwen 3", "Qwen 3.5"])
def test_damaged_packed_weights_are_removed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all(tmp_path, monkeypatch)
    hybrid = name == "Qwen 3.5"  # transformers cannot map its packed weights
    path = written(tmp_path, name)
    options = CertifyOptions(str(path), ModelConfig(dtype=DTYPE))
    assert isinstance(loaded(path).model, RuntimeModel)
    assert certify(options, print) == []
    (weights,) = (tmp_path / "cache" / "packed").glob("*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1 if hybrid else -4000] ^= 1
    weights.write_bytes(data)
    (line,) = certify(options, print)
    assert "damaged; they are removed" in line
    assert not weights.exists()


def test_what_needs_transformers_anyway(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(H2OStreamError, match="is read through transformers anyway: its file is packed in another"):
        certify(CertifyOptions(str(file), ModelConfig(quantize="int4")), print)
