"""Models and tokenizers shared by the tests: tiny random models for breadth, the embedded model for realism."""

import copy
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, UnsupportedModelError, attach
from h2o_stream.base.resources import wheel_file
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import ModelConfig
from h2o_stream.engine.served import serve
from h2o_stream.loading.loading import load_model
from h2o_stream.loading.transformers_model import LoadedModel, load, load_tokenizer
from h2o_stream.models.find import EMBEDDED_WHEEL
from h2o_stream.recall.terms import TermWeights
from tests.gguf_files import write_model
from tests.kept_tokenizers import keep_tokenizers

torch.set_grad_enabled(False)
keep_tokenizers()
settings.register_profile("some", deadline=None, max_examples=25)  # a busy machine is no failure
settings.register_profile("exhaustive", settings.get_profile("some"), max_examples=100)
settings.register_profile("long", settings.get_profile("some"), max_examples=100_000)  # --hypothesis-profile long


def make_llama(
    heads: int = 2, groups: int = 1, layers: int = 2, size: int = 8, vocab: int = 64, context: int = 512, seed: int = 0
) -> LlamaForCausalLM:
    """A random Llama of Hkv = heads and Hq = heads * groups; weights large enough for attention to be uneven.

    A copy of one that is made once, which takes seven times as long with a large vocabulary.
    """
    model, random_state = _made_llama(heads, groups, layers, size, vocab, context, seed)
    torch.set_rng_state(random_state)
    return copy.deepcopy(model)


@cache
def _made_llama(
    heads: int, groups: int, layers: int, size: int, vocab: int, context: int, seed: int
) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """The model, and the state of the random generator after making it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=heads * groups * size, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=heads * groups, num_key_value_heads=heads, head_dim=size, max_position_embeddings=context,
        initializer_range=0.4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), torch.get_rng_state()


def make_grouped(monkeypatch: pytest.MonkeyPatch, groups: Sequence[tuple[HeadWindow, ...]]) -> LlamaForCausalLM:
    """A model of three layers of three KV heads whose windows are these, by layer, as if they were measured."""

    def assigned(model: Any, specs: Any, progress: Any) -> Any:
        return [replace(spec, windows=windows) for spec, windows in zip(specs, groups, strict=True)]

    monkeypatch.setattr("h2o_stream.attachment.attach.give_retrieval_heads_more", assigned)
    return make_llama(heads=3, groups=2, layers=3, context=256)


def ids(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Random tokens of `make_llama` [rows, count], none of them special."""
    return torch.randint(3, 64, (rows, count), generator=torch.Generator().manual_seed(seed))


def written(path: Path, lines: Iterable[Any]) -> Path:
    """A file of lines in JSON."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def saved(model: PreTrainedModel, tokenizer: Any, folder: Path) -> Path:
    """A folder with the model and the tokenizer, as commands take it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_exhaustive(some: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """Values of a parameter: some for `make test`, and the rest, which `make test-all` takes too."""
    rows = (value if isinstance(value, tuple) else (value,) for value in rest)
    return [*some, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in rows)]


def thinned(values: Iterable[Any], chosen: Callable[..., bool]) -> list[Any]:
    """Rows of parameters, of which `make test` takes the chosen ones."""
    return [pytest.param(*row, marks=() if chosen(*row) else pytest.mark.exhaustive) for row in values]


def refusal(model: Any, **settings: Any) -> str:
    """Why the model is refused."""
    with pytest.raises(UnsupportedModelError) as refused, attach(model, CacheConfig(**{"window": 32, **settings})):
        pass
    return str(refused.value)


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture
def grouped() -> LlamaForCausalLM:
    return make_llama(heads=2, groups=3)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a tiny random Llama."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_model(path, make_llama(), "llama")
    return path


@pytest.fixture(scope="session")
def embedded_file() -> Path:
    """The GGUF file of the embedded model."""
    file = wheel_file(EMBEDDED_WHEEL, ".gguf")
    assert file is not None, "make test installs it"
    return file


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    """The embedded model with unpacked weights."""
    return load(ModelConfig(dtype="float32", device="cpu", quantize="none"))


@pytest.fixture(scope="session")
def served_embedded() -> LoadedModel:
    """The embedded model as commands load it: packed, and run by native code where there is any."""
    return load_model(ModelConfig(dtype="float32"), CacheConfig(), "auto", print, print)


@pytest.fixture(scope="session")
def related(served_embedded: LoadedModel) -> TermWeights:
    """What words weigh, and which are related, by the embedded model."""
    served = serve(served_embedded.model, CacheConfig(window=64), "auto", print)
    return TermWeights(served_embedded.tokenizer, served.read_embeddings)


_VOCABULARY = 8192
"""Tokens of the tokenizer of tests; to read and to copy it takes a fifth of the time of the whole."""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer with the first tokens of its vocabulary."""
    return shortened(load_tokenizer(ModelConfig()), _VOCABULARY)


def shortened(tokenizer: Any, size: int) -> PreTrainedTokenizerBase:
    """A tokenizer with so many tokens of its vocabulary, the first ones."""
    small: Any = copy.copy(tokenizer)
    rules = json.loads(small.backend_tokenizer.to_str())
    model, kept = rules["model"], {token for token, number in rules["model"]["vocab"].items() if number < size}
    model["vocab"] = {token: number for token, number in model["vocab"].items() if token in kept}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in kept]
    small._tokenizer = Tokenizer.from_str(json.dumps(rules))
    return cast(PreTrainedTokenizerBase, small)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A random Llama with the embedded model's tokenizer, small enough for many commands to load."""
    folder = tmp_path_factory.mktemp("tiny-model")
    return saved(make_llama(vocab=len(tokenizer), context=400), tokenizer, folder)


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The same with the context length that the documentation assumes."""
    folder = tmp_path_factory.mktemp("long-model")
    return saved(make_llama(vocab=len(tokenizer), context=8192), tokenizer, folder)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of about 1,100 tokens."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 80)
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions with two turns each."""
    lines = [{"question_id": n, "category": "test", "turns": ["first " * 30, "then"]} for n in range(3)]
    return written(tmp_path / "questions.jsonl", lines)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Separate sessions and settings for each test: the folder of the sessions."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "data" / "h2o-stream" / "sessions"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept from before: the folder of what is packed, exported and measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "h2o-stream"


@pytest.fixture
def nothing_is_known(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model was verified before."""
    monkeypatch.setattr("h2o_stream.attachment.verification._known", set())


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files for charts, which take half a second each; test_report.py and test_cli_compare.py draw them."""
    monkeypatch.setattr("h2o_lab.report.report.svg", lambda chart, style: "<svg/>")
    monkeypatch.setattr("h2o_stream.ui.comparison.draw", lambda chart, path: path.touch())


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the harness from reading thousands of tasks, which takes 15 seconds, and from running pip."""
    task_manager = pytest.importorskip(
        "lm_eval.tasks", reason="the harness is not installed: make setup-all"
    ).TaskManager
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(task_manager, include_defaults=False))
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_: ("pip", ""))


@pytest.fixture
def talker(tokenizer: PreTrainedTokenizerBase) -> Callable[..., PreTrainedModel]:
    """Makes a random Llama with the embedded model's vocabulary."""

    def make(**more: int) -> PreTrainedModel:
        return make_llama(vocab=len(tokenizer), **more)

    return make


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile", None):
        settings.load_profile("some" if "not exhaustive" in config.getoption("markexpr") else "exhaustive")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark rows exhaustive that `every` leaves out. Put tests of the unpacked embedded model side by side, so that only
    one process loads it.
    """
    rows = Counter[str]()
    for item in items:
        every, name = item.get_closest_marker("every"), item.nodeid.partition("[")[0]
        if every is None or item.get_closest_marker("exhaustive"):
            continue
        if rows[name] % every.args[0]:
            item.add_marker("exhaustive")
        rows[name] += 1
    items.sort(key=lambda item: "embedded" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Take everything that was imported and collected from the garbage collector, and call it less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
