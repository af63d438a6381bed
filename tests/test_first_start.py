"""The first start of a GGUF file needs no torch; meanwhile it is compared with transformers' model."""

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer

from h2o_stream.attachment import retrieval_heads
from h2o_stream.attachment.model_facts import max_distance_of
from h2o_stream.attachment.support import layer_specs
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.engine import check as checks
from h2o_stream.engine import referee
from h2o_stream.engine.check import DamagedWeightsError, check
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError, OutOfMemoryError
from h2o_stream.models.load import load
from h2o_stream.models.packed_folder import COMPARED_FILE
from h2o_stream.native import module_reader
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime import checking, file_ropes, sources
from h2o_stream.runtime.checking import BackgroundCheck
from h2o_stream.runtime.heads import attention_to_copy, measured_windows
from h2o_stream.runtime.known import Known, read_known
from h2o_stream.runtime.loading import load_model
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.sources import ModelFile
from h2o_stream.ui.start import finish_check
from h2o_stream.ui.terminal import SafeConsole, Terminal
from tests.fixtures import with_exhaustive
from tests.likely_text import likely_lines
from tests.test_runtime import MODELS, TEXT, keep_all, written

DTYPE = "float32"
WRONG = """
from h2o_stream.runtime import file_ropes
right = file_ropes.rope_frequencies
file_ropes.rope_frequencies = lambda theta, size: right(theta**0.25, size)
"""
"""Makes a process read files with another base of RoPE."""


@pytest.fixture(scope="module")
def said() -> Any:
    """What the model of `file` says."""
    return likely_lines(MODELS["Qwen 3"][1]())


@pytest.fixture
def text(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two readings of `file` can be told apart."""
    monkeypatch.setattr(referee, "LINES", said)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of which nothing is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return written(tmp_path, "Qwen 3")


def swapped(load: Any) -> Any:
    """A `load` that reads a matrix in place of another."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        mlp = found.model.model.layers[0].mlp
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
        return found

    return wrong


def loaded(file: Path, **cache: Any) -> Any:
    return load_model(ModelConfig(str(file), dtype=DTYPE), CacheConfig(window=40, **cache), "auto", print, print)


class TestHeads:
    @pytest.mark.parametrize(
        "name", with_exhaustive(["Qwen 3 MoE", "Gemma 3", "Phi 3"], ["Llama", "Qwen 3", "Gemma 2", "Starcoder 2"])
    )
    def test_attention_is_that_of_the_model(self, name: str, tmp_path: Path) -> None:
        path = written(tmp_path, name)
        source, model = ModelFile(str(path), path, DTYPE), load(ModelConfig(str(path), dtype=DTYPE)).model
        plan = CacheConfig(window=8, chunk=4).plan(max_distance_of(model.config))
        specs = layer_specs(model, plan)
        expected = retrieval_heads._attention_to_copy(model, specs).numpy()
        found = attention_to_copy(source.describe(print), source.parameters.windows, source.parameters.context)
        numpy.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
        theirs = retrieval_heads.give_retrieval_heads_more(model, specs)
        ours = measured_windows(source.describe(print), source.parameters.windows, source.parameters.context, print)
        assert [spec.windows for spec in theirs] == ours

    def test_what_was_measured_is_kept(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "LONG_S", 0.0)
        first = loaded(file).model.windows
        monkeypatch.setattr(sources, "measured_windows", None)
        assert first == loaded(file).model.windows


class TestCheck:
    def test_what_is_right_is_known_from_then_on(self, file: Path) -> None:
        assert read_known(file, DTYPE) is None
        assert loaded(file).check is not None
        known = check(str(file), file, DTYPE)
        assert known == Known(known.digest)
        assert read_known(file, DTYPE) == known
        assert loaded(file).check is None

    @pytest.mark.usefixtures("text")
    @pytest.mark.parametrize("trusted", [False, True])
    def test_a_wrong_base_of_rope_is_found(self, file: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the description, and if that were not compared by the logits."""
        right = file_ropes.rope_frequencies
        monkeypatch.setattr(file_ropes, "rope_frequencies", lambda theta, size: right(theta**0.25, size))
        if trusted:
            monkeypatch.setattr(checks, "difference", lambda ours, theirs: "")
        known = check(str(file), file, DTYPE)
        assert "logits are off" in known.difference
        assert ("frequencies of rope" in known.difference) != trusted
        again = loaded(file)
        assert not isinstance(again.model, RuntimeModel)
        assert known.difference in again.why_transformers

    @pytest.mark.usefixtures("text")
    def test_a_wrong_model_of_transformers_is_told_apart(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("h2o_stream.models.load.load", swapped(load))
        known = check(str(file), file, DTYPE)
        assert known.difference == ""
        assert "logits are off" in known.doubt
        assert "transformers reads it wrongly" in known.doubt
        assert isinstance(loaded(file).model, RuntimeModel)

    def test_what_no_text_decides_has_no_effect(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Random weights predict plain text as well as others."""
        monkeypatch.setattr("h2o_stream.models.load.load", swapped(load))
        known = check(str(file), file, DTYPE)
        assert known.difference == ""
        assert "a text does not tell which" in known.doubt
        assert isinstance(loaded(file).model, RuntimeModel)

    @pytest.mark.parametrize("refused", [False, True])
    def test_what_is_only_described_otherwise_has_no_effect(
        self, file: Path, refused: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The description of transformers' model is a reading of ours, too."""
        norm_of = module_reader.norm_of

        def wrong(*args: Any) -> Any:
            if refused:
                raise DescriptionError("a norm cannot be told apart")
            norm = norm_of(*args)
            return replace(norm, weight=1 + norm.weight)

        monkeypatch.setattr(module_reader, "norm_of", wrong)
        known = check(str(file), file, DTYPE)
        assert known.difference == ""
        assert ("told apart" if refused else "weight of ") in known.doubt
        assert "logits" not in known.doubt

    def test_which_tokens_are_called_special_is_no_difference(
        self, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def unmarked(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            rules = json.loads(found.tokenizer.backend_tokenizer.to_str())
            for token in rules["added_tokens"]:
                token["special"] = not token["special"]
            found.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))
            return found

        monkeypatch.setattr("h2o_stream.models.load.load", unmarked)
        known = check(str(file), file, DTYPE)
        assert known == Known(known.digest)

    def test_without_torch_there_is_none(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checking.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
        found = loaded(file)
        assert found.check is None
        assert found.model.other_digest() == found.model.digest

    def test_a_lack_of_memory_is_no_difference(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A start without enough memory goes through transformers; nothing of it is kept."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        path = written(tmp_path, "Qwen 3", "F32")
        with monkeypatch.context() as patch:
            patch.setattr(sources, "free_bytes", lambda: 2**10)
            with pytest.raises(OutOfMemoryError, match="the dense weights of .* take"):
                check(str(path), path, DTYPE)
            assert "0 MiB of memory are free" in loaded(path).why_transformers
        assert read_known(path, DTYPE) is None
        assert isinstance(loaded(path).model, RuntimeModel)

    def test_a_wrong_row_of_the_table_is_found(self, file: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = {**sources.ARCHITECTURES, "qwen3": replace(sources.ARCHITECTURES["qwen3"], interleaved=True)}
        monkeypatch.setattr(sources, "ARCHITECTURES", wrong)
        monkeypatch.setattr(referee, "LINES", said)
        assert "other weights" in check(str(file), file, DTYPE).difference

    def test_damaged_packed_weights_are_found_and_removed(
        self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep_all(tmp_path, monkeypatch)
        source = ModelFile(str(file), file, DTYPE)
        source.describe(print, print)
        assert source.folder is not None
        weights = source.folder / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-4000] + bytes([whole[-4000] ^ 1]) + whole[-3999:])
        with pytest.raises(DamagedWeightsError, match="other weights"):
            check(str(file), file, DTYPE)
        assert not source.folder.exists()
        assert isinstance(loaded(file).model, RuntimeModel), "they are packed anew"
        assert check(str(file), file, DTYPE).difference == ""
        assert (source.folder / COMPARED_FILE).exists()

    def test_a_check_that_is_killed_is_repeated(self, file: Path) -> None:
        first, second = (BackgroundCheck(str(file), file, DTYPE) for _ in range(2))
        first.begin()
        assert not first.ended
        assert first._process is not None
        first._process.kill()
        assert first.wait(10)
        assert first.failure
        assert not first.complaint
        assert read_known(file, DTYPE) is None
        assert second.wait(60)
        assert not second.failure
        assert read_known(file, DTYPE) is not None

    def test_what_transformers_cannot_load(self, tmp_path: Path) -> None:
        failed = BackgroundCheck("x", tmp_path / "none.gguf", DTYPE)
        assert failed.wait(60)
        assert "none.gguf" in failed.failure


class Waiting:
    """A check that takes some frames."""

    complaint = failure = doubt = stage = ""

    def __init__(self, *stages: str) -> None:
        self._stages = list(stages)

    def wait(self, timeout_s: float = float("inf")) -> bool:
        if not self._stages:
            return True
        self.stage = self._stages.pop(0)
        if self.stage == "Ctrl-C":
            raise KeyboardInterrupt
        return timeout_s == float("inf")


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("skipped", [True, False])
def test_waiting_for_the_check(live: bool, skipped: bool) -> None:
    """One line says what is waited for; on a terminal also what the check does, and for how long."""
    terminal, drawn = Terminal(), io.StringIO()
    terminal.live, terminal.console = live, SafeConsole(file=drawn, force_terminal=live, width=150)
    check: Any = Waiting("starting", "reading it", *["Ctrl-C"] * skipped, "comparing weights", "comparing weights")
    loaded: Any = SimpleNamespace(
        model=SimpleNamespace(check=check), interrupts=SimpleNamespace(requested=False), name="tiny", check=lambda: None
    )
    finish_check(loaded, terminal)
    shown = drawn.getvalue()
    assert "checking tiny against transformers, only this time (Ctrl-C skips)" in shown
    assert ("comparing weights, 0 s" in shown) == (live and not skipped)
    assert ("not checked; the next start does it" in shown) == (skipped and live)


class TestStates:
    def test_of_a_file_that_was_not_compared_go_to_transformers_and_back(self, file: Path) -> None:
        unknown, theirs = loaded(file), load(ModelConfig(str(file), dtype=DTYPE))
        config = CacheConfig(window=40, budgets="equal")
        with (
            Engine(unknown.model, unknown.tokenizer, config) as ours,
            Engine(theirs.model, theirs.tokenizer, config) as other,
        ):
            for engine, to in ((ours, other), (other, ours)):
                engine.reset()
                list(engine.prefill(TEXT[:60]))
                to.load_state_dict(engine.state_dict())
                assert to.tokens == engine.tokens
        assert unknown.check.ended, "the second needs what transformers' model is called"
        known = loaded(file)
        with (
            Engine(unknown.model, unknown.tokenizer, config) as before,
            Engine(known.model, known.tokenizer, config) as after,
        ):
            list(before.prefill(TEXT[:60]))
            after.load_state_dict(before.state_dict())

    def test_of_another_file_are_refused(self, file: Path, tmp_path: Path) -> None:
        folder = tmp_path / "other"
        folder.mkdir()
        models = [loaded(path) for path in (file, written(folder, "Qwen 2"))]
        for found in models:
            found.check.failure = "not in this test"
        config = CacheConfig(window=40, budgets="equal")
        with Engine(models[0].model, models[0].tokenizer, config) as first:
            list(first.prefill(TEXT[:60]))
            state = first.state_dict()
        with (
            Engine(models[1].model, models[1].tokenizer, config) as second,
            pytest.raises(H2OStreamError, match="another model"),
        ):
            second.load_state_dict(state)


def chat(file: Path, before: str = "", *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A chat in a process of its own, which must not import torch."""
    code = f"""
import sys
from h2o_stream.runtime import checking
checking._CODE = {before!r} + checking._CODE
from h2o_stream.cli import chat
sys.argv = ["h2o-chat", "-m", {str(file)!r}, "--dtype", "{DTYPE}", "-p", "the", "-n", "3", *{list(arguments)}]
try:
    chat.main()
finally:
    print("torch" in sys.modules or "transformers" in sys.modules)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


class TestChat:
    def test_the_first_start_imports_no_torch_and_waits_for_the_check(self, file: Path) -> None:
        first = chat(file, "", "-v")
        assert (first.returncode, first.stdout.split()[-1]) == (0, "False"), first.stderr
        assert "for the first time" in first.stderr
        assert read_known(file, DTYPE) is not None
        second = chat(file, "", "-v")
        assert (second.returncode, second.stdout.split()[-1]) == (0, "False"), second.stderr
        assert "without torch" in second.stderr
        assert "for the first time" not in second.stderr

    @pytest.mark.exhaustive
    def test_a_difference_is_told_in_one_line_and_the_next_start_needs_torch(self, file: Path, said: Any) -> None:
        first = chat(file, f"{WRONG}from h2o_stream.engine import referee; referee.LINES = {said!r}; ", "-q")
        assert first.returncode == 1
        assert "read wrongly from its file" in first.stderr
        assert "frequencies of rope" in first.stderr
        assert len(first.stderr.splitlines()) == 1
        second = chat(file, "", "-v")
        assert (second.returncode, second.stdout.split()[-1]) == (0, "True"), second.stderr
        assert "loaded by torch and transformers: its file was found to be read wrongly" in second.stderr

    def test_a_difference_stops_the_reply(self, file: Path, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from h2o_stream.ui.interrupts import Interrupts

        found = loaded(file)
        interrupts = Interrupts(found.check)
        with Engine(found.model, found.tokenizer, CacheConfig(window=40), should_stop=interrupts) as engine:
            engine.end_tokens = frozenset()
            list(engine.prefill(TEXT[:30]))
            reply = engine.decode()
            next(reply)
            judged = f"{WRONG}from h2o_stream.engine import referee; referee.LINES = {said!r}; "
            monkeypatch.setattr(checking, "_CODE", judged + checking._CODE)
            assert found.check.wait(60)
            assert next(reply).reason == "interrupted"  # type: ignore[union-attr]
