"""How text is split before merging: as the GGUF file's pre-tokenizer says, or the file is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from h2o_stream import UnsupportedModelError
from h2o_stream.base.progress import ignore
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.loading.loading import load_model
from h2o_stream.models.find import find
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_pretokenizer import _REGEXES
from h2o_stream.models.gguf_tokenizer import gguf_tokenizer
from tests.fixtures import make_llama
from tests.gguf_files import finish, write_model
from tests.in_turn import in_turn

TEXTS = [
    "In 2024, 12345 of them", "a1b2 c3", "½ ² ٣ ٤٢", "\n\n 7\t8  don't I'LL it's\n", "x=(1+22)*333;", "Größe 東京 3,5",
    "  two  spaces  99  ", "HTTPServer2 fooBar", "",
]  # fmt: skip
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str | None], Any]:
    """Load the tokenizer of a small file whose pre-tokenizer has this name."""

    def load(name: str | None) -> Any:
        path = tmp_path / "small.gguf"
        write_model(path, make_llama(), "llama", pre=name)
        return gguf_tokenizer(GgufFile(path))

    return load


def pieces(pre_tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.exhaustive
def test_digits_of_the_embedded_model() -> None:
    """SmolLM2's own definition: every digit apart, then GPT-2's regex."""
    file = GgufFile(Path(find("smollm2-135m", True)))
    tokenizer = gguf_tokenizer(file)
    ours = [tokenizer(text)["input_ids"] for text in TEXTS]
    tokenizer.backend_tokenizer.pre_tokenizer = DIGITS
    assert ours == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert [tokenizer.decode(tokens) for tokens in ours] == TEXTS


SAYS = "I'LL say 12345!\n\n"


@in_turn("name, text, expected", [
    *((name, SAYS, ["I", "'", "LL", "Ġsay", "Ġ", *"12345", "!", "\u010a\u010a"])
      for name in ("smollm", "starcoder", "command-r", "refact")),
    *((name, SAYS, ["I", "'", "LL", "Ġsay", "Ġ12345", "!", "\u010a\u010a"]) for name in ("gpt-2", "olmo", "mpt")),
    *((name, SAYS, ["I", "'", "LL", "Ġsay", "Ġ", "123", "45", "!", "\u010a\u010a"]) for name in ("falcon", "default")),
    *((name, SAYS, ["I", "'LL", "Ġsay", "Ġ", "123", "45", "!\u010a\u010a"]) for name in ("llama-bpe", "deepseek-v3")),
    *((name, SAYS, ["I", "'LL", "Ġsay", "Ġ", *"12345", "!\u010a\u010a"])
      for name in ("qwen2", "tekken", "bailingmoe2")),
    ("deepseek-coder", SAYS, ["I", "'", "LL", "Ġsay", "Ġ", *"12345", "!", "\u010a", "\u010a"]),
    ("seed-coder", SAYS, ["I", "'LL", "Ġsay", "Ġ", *"12345", "!", "\u010a\u010a"]),
    ("kimi-k2", SAYS, ["I'LL", "Ġsay", "Ġ", "123", "45", "!\u010a\u010a"]),
    ("kimi-k2", "中文English混合 fooBar",
        ["".join(pieces(BYTES, part)) for part in ("中文", "English", "混合", " foo", "Bar")]),
    ("falcon", "a,b $1234567", ["a", ",", "b", "Ġ", "$", "123", "456", "7"]),
    ("default", "x1234 it's 5.", ["x", "123", "4", "Ġit", "'", "s", "Ġ", "5", "."]),
])  # fmt: skip
def test_pieces(name: str, text: str, expected: list[str], load: Callable[[str | None], Any]) -> None:
    assert pieces(load(name).backend_tokenizer.pre_tokenizer, text) == expected


@in_turn("name", GGUF_PRE_TOKENIZER_SPLITS)
def test_the_regexes_that_transformers_has(name: str) -> None:
    assert _REGEXES[name] == (GGUF_PRE_TOKENIZER_SPLITS[name],)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", _REGEXES)
def test_every_regex_loses_nothing(name: str, load: Callable[[str | None], Any]) -> None:
    pre_tokenizer = load(name).backend_tokenizer.pre_tokenizer
    for text in TEXTS:
        assert "".join(pieces(pre_tokenizer, text)) == "".join(pieces(BYTES, text))


@pytest.mark.parametrize(("name", "ignored"), [("llama-bpe", True), ("tekken", True), ("smollm", False)])
def test_merges_are_ignored_where_llama3_ignores_them(name: str, ignored: bool, load: Callable[..., Any]) -> None:
    assert load(name).backend_tokenizer.model.ignore_merges is ignored


def test_unknown_ones_are_refused(load: Callable[[str | None], Any]) -> None:
    words = "small.gguf has the unknown pre-tokenizer 'no-such'.* transformers' format"
    with pytest.raises(UnsupportedModelError, match=words) as error:
        load("no-such")
    assert "\n" not in str(error.value)


def test_old_files_are_split_as_by_llama_cpp_and_say_so(load: Callable[[str | None], Any], tmp_path: Path) -> None:
    default, missing = (load(name).backend_tokenizer for name in ("default", None))
    assert missing.pre_tokenizer.__getstate__() == default.pre_tokenizer.__getstate__()
    notes: list[str] = []
    load_model(ModelConfig(str(tmp_path / "small.gguf")), CacheConfig(window=32), "auto", notes.append, ignore)
    assert [note for note in notes if "tokenizer.ggml.pre" in note and "\n" not in note] == notes[:1]


def test_as_llama_cpp_splits(tmp_path: Path) -> None:
    """Every pair of letters may be merged, so that tokens show where text is split.

    Combining marks are left out: llama.cpp takes them for what they are not, where regexes of models know them.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    texts = [*TEXTS, "中文English混合", "a.b\n\n\nc \r\n d", "!!\n", "'s 'Sx foo_bar $5`"]
    letters = ["".join(pieces(BYTES, text)) for text in texts]
    pairs = sorted({text[at : at + 2] for text in letters for at in range(len(text) - 1)})
    tokens = ["<unk>", "<s>", "</s>", *sorted(BYTES.alphabet()), *pairs]
    path = tmp_path / "small.gguf"
    for name in (*_REGEXES, None):
        writer = gguf.GGUFWriter(path, "llama")
        for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
            getattr(writer, f"add_{key}")(32)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        if name is not None:
            writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
        writer.add_token_merges([" ".join(pair) for pair in pairs])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_tensor("output_norm.weight", numpy.ones(32, numpy.float32))  # else it is a vocabulary alone
        finish(writer)
        ours = gguf_tokenizer(GgufFile(path))
        assert ours is not None
        theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        for text in texts:
            found = ours.backend_tokenizer.encode(text, add_special_tokens=False).ids
            assert found == theirs.tokenize(text.encode(), add_bos=False), (name, text)
        theirs.close()
