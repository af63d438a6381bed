"""Digests of models, policies and machines: different ones never match."""

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from h2o_stream import CacheConfig, H2OStreamError, attach, config
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.source import policy_source
from h2o_stream.compare import folder
from h2o_stream.config import POLICIES, PolicyDefaults
from h2o_stream.errors import DataError
from h2o_stream.models.packed_layers import PackedLinear
from h2o_stream.models.quantize import packed_kinds, replace_module
from h2o_stream.native.packing import pack
from tests import families
from tests.commands import invoke
from tests.families import each_family
from tests.fixtures import ids, make_llama, saved, with_exhaustive

TOKENS = ids(40)


def packed(quantize: str) -> Any:
    """A tiny model with the same weights in the given number of bits."""
    model = make_llama(size=16)
    for name, kind in packed_kinds(model, quantize).items():
        replace_module(model, name, kind, pack(model.get_submodule(name).weight.contiguous(), kind))
    return model


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one row": lambda model: model.model.embed_tokens.weight[17].mul_(1.01),
    "behind the version": lambda model: model.model.layers[1].mlp.up_proj.weight.data.add_(1e-3),
    "epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.1),
    "hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 2),
    "patch": lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: x),
    "swap": lambda model: setattr(model.model.layers[0].mlp.up_proj, "__class__", Doubled),
}


class TestModel:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_a_change_is_noticed(self, tiny: Any, change: Callable[[Any], None]) -> None:
        before = model_digest(tiny)
        change(tiny)
        assert model_digest(tiny) != before

    @pytest.mark.parametrize("number", with_exhaustive(range(0, 64 * 16, 93), range(37, 64 * 16, 37)))
    def test_every_number_of_a_weight_counts(self, number: int) -> None:
        """For models without a cached digest."""
        model, other = make_llama(), make_llama()
        other.model.embed_tokens.weight.view(-1)[number] += 1e-5
        assert model_digest(model) != model_digest(other)

    def test_packed_otherwise_it_is_another(self) -> None:
        digests = {model_digest(packed("int8")), model_digest(packed("int4")), model_digest(make_llama(size=16))}
        assert len(digests) == 3
        assert sorted(digest.split()[1] for digest in digests) == ["float32", "int4+int8", "int8"]

    def test_one_code_of_a_packed_weight_counts(self) -> None:
        model, other = packed("int4"), packed("int4")
        assert model_digest(model) == model_digest(other)
        layer = next(module for module in other.modules() if isinstance(module, PackedLinear))
        layer.tiles.view(-1)[100] ^= 1
        assert model_digest(model) != model_digest(other)

    @pytest.mark.every(2)
    @each_family
    def test_it_is_the_same_before_while_and_after_it_runs(self, family: Any) -> None:
        model = copy.deepcopy(family.make())
        before = model_digest(model)
        with attach(model, CacheConfig(window=12, positions=family.positions[0], chunk=5)) as cache:
            model(TOKENS, past_key_values=cache)
            assert model_digest(model) == before
        model.train()
        model(TOKENS[:, :5])
        assert model_digest(model) == before
        assert model_digest(copy.deepcopy(model).eval()) == before


class TestAdapters:
    @pytest.fixture
    def lora(self, tiny: Any) -> Any:
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        return peft.get_peft_model(tiny, settings)

    @pytest.mark.parametrize("change", [
        lambda lora: lora.merge_adapter(),
        lambda lora: lora.base_model.disable_adapter_layers(),
        lambda lora: lora.add_adapter("more", lora.peft_config["default"]) or lora.set_adapter("more"),
        lambda lora: lora.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 8.0),
    ], ids=["merged", "disabled", "another is active", "scaled"])  # fmt: skip
    def test_they_are_part_of_it(self, lora: Any, change: Callable[[Any], Any]) -> None:
        base = lora.base_model.model
        before = model_digest(base)
        assert model_digest(base) == before
        change(lora)
        assert model_digest(base) != before

    def test_and_of_states(self, lora: Any) -> None:
        base = lora.base_model.model
        with attach(base, CacheConfig(window=24)) as cache:
            base(TOKENS, past_key_values=cache)
            state = cache.state_dict()
        lora.base_model.disable_adapter_layers()
        with attach(base, CacheConfig(window=24)) as cache, pytest.raises(H2OStreamError, match="another model"):
            cache.load_state_dict(state)


_POLICY = """
from h2o_stream.cache.policies import Policy

SIGN = {sign}

class Mine(Policy):
    def priority(self, held):
        return SIGN * held.scores
"""


class TestPolicy:
    @pytest.fixture
    def written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        """Writes a user-defined policy, a different one for each sign, as a new process would load it."""
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setitem(POLICIES, "mine", PolicyDefaults(0.5, 4, 1.0, "rolling", "mine_policy:Mine"))

        def write(sign: int) -> None:
            (tmp_path / "mine_policy.py").write_text(_POLICY.format(sign=sign))
            sys.modules.pop("mine_policy", None)
            importlib.invalidate_caches()

        yield write
        sys.modules.pop("mine_policy", None)

    def test_our_policies_are_identified_by_the_version(self) -> None:
        ours = [name for name, policy in POLICIES.items() if policy.rule.startswith("h2o_stream.")]
        assert len(ours) > 5
        assert {policy_source(CacheConfig(name).plan()) for name in ours} == {""}

    def test_a_state_of_an_edited_one_is_refused(self, tiny: Any, written: Callable[[int], None]) -> None:
        written(1)
        with attach(tiny, CacheConfig("mine", window=24)) as cache:
            tiny(TOKENS, past_key_values=cache)
            state = cache.state_dict()
            cache.load_state_dict(state)
        written(-10)
        refused = pytest.raises(H2OStreamError, match="another policy's source")
        with attach(tiny, CacheConfig("mine", window=24)) as cache, refused:
            cache.load_state_dict(state)

    def test_a_figure_of_an_edited_one_is_another(
        self, tiny: Any, tmp_path: Path, written: Callable[[int], None]
    ) -> None:
        from h2o_stream.compare.comparison import cache_settings

        settings = [CacheConfig("mine", window=24)]
        written(1)
        before, run = folder.identity(tiny, settings[0]), {"command": "h2o-compare nll", **cache_settings(settings)}
        folder.Folder(tmp_path / "out").claim(run)
        folder.Folder(tmp_path / "out").claim(run)
        written(-10)
        assert folder.identity(tiny, settings[0]) != before
        with pytest.raises(DataError, match="policies that this run leaves out"):
            folder.Folder(tmp_path / "out").claim({"command": "h2o-compare nll", **cache_settings(settings)})


class TestMachine:
    def test_a_timed_figure_is_of_the_threads_and_of_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = folder.machine()
        assert folder.machine() == before
        assert before["threads"] == torch.get_num_threads()
        monkeypatch.setattr(folder.library, "identity", lambda: "another")
        assert folder.machine() != before

    def test_a_folder_of_another_machine_is_refused(self, tmp_path: Path) -> None:
        run = {"command": "h2o-compare speed", "machine": folder.machine(), "hardware": 1}
        folder.Folder(tmp_path).claim(run)
        folder.Folder(tmp_path).claim({**run, "hardware": 2})
        with pytest.raises(DataError, match="its machine is"):
            folder.Folder(tmp_path).claim({**run, "machine": {**run["machine"], "processor": "Z80"}})


def test_the_matrices_have_every_policy() -> None:
    """As docs/extending.md promises."""
    assert set(families.POLICIES) == set(config.POLICIES)


@pytest.mark.exhaustive
class TestInTheShell:
    """The same weights in 8 and in 4 bits."""

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
        return saved(make_llama(size=16, vocab=len(tokenizer)), tokenizer, tmp_path_factory.mktemp("model"))

    def test_a_folder_is_of_one(self, model: Path, text: Path, tmp_path: Path) -> None:
        options = ["nll", "-m", model, "--text", text, "--tokens", "100", "--windows", "32"]
        options += ["--policies", "h2o", "-q", "--out", tmp_path / "out"]
        assert invoke("h2o-compare", *options, "--quantize", "int8").exit_code == 0
        assert invoke("h2o-compare", *options, "--quantize", "int8").exit_code == 0
        before = (tmp_path / "out" / "records.jsonl").read_text()
        refused = invoke("h2o-compare", *options, "--quantize", "int4")
        assert refused.exit_code == 1
        assert "holds another run: its identity is file " in refused.stderr
        assert (tmp_path / "out" / "records.jsonl").read_text() == before

    def test_a_session_is_of_one(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        options = ["-m", model, "--session", "one", "-p", "Hello", "-n", "3"]
        assert invoke("h2o-chat", *options, "--quantize", "int8").exit_code == 0
        assert invoke("h2o-chat", *options, "--quantize", "int8").exit_code == 0
        refused = invoke("h2o-chat", *options, "--quantize", "int4")
        assert refused.exit_code == 1
        assert "session one cannot be resumed: the state belongs to another model" in refused.stderr
