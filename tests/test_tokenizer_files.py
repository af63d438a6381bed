"""Tokenizers read without transformers: they encode, decode and render as those of transformers do."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import transformers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from h2o_stream import (
    CacheConfig,
    Conversation,
    Engine,
    ModelNotFoundError,
    RecallConfig,
    SamplingConfig,
    UnsupportedModelError,
)
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load_tokenizer
from h2o_stream.models import gguf_pieces
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_tokenizer import gguf_tokenizer
from h2o_stream.models.templates import FALLBACK_TEMPLATE, with_template
from h2o_stream.models.tokenizer import FileTokenizer
from h2o_stream.recall.located import decode
from h2o_stream.recall.terms import TermWeights
from h2o_stream.session.cliff import Cliff
from h2o_stream.session.conversation_state import TurnSpan
from h2o_stream.session.retention import retention
from h2o_stream.session.template import ChatTemplate
from tests import gguf_files
from tests.fixtures import make_llama
from tests.gguf_files import MERGES, TOKENS, write_model
from tests.in_turn import in_turn

TEXTS = [
    "", " ", "Hello, world!", "  two  spaces\n\n\ttab \r\n", "12345 ½ ² ٣ 2024", "I'LL don't it's",
    "Größe naïve e\u0301", "日本語のテキスト", "🙂👩‍👩‍👧‍👦 🏳️‍🌈", "<|im_start|>user\nhi<|im_end|>",
    "a<|endoftext|>b", "<file_sep> <|im_end", "\x00\u202e\ufffd\ue000",
    "def f(x):\n    return x ** 2\n", "a" * 300, "مرحبا שלום हिन्दी",
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"é<&": {}}}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, 2.5, "<x>"]}}}
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
LONGER = [
    {"role": "system", "content": "Be brief.\n"},
    *CHAT,
    {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": "hm", "name": None},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "4 is four"},
    {"role": "user", "content": "And {{ 3 }} <|im_end|>?"},
]
TEMPLATES = {
    "of the embedded model": None,
    "fallback": FALLBACK_TEMPLATE,
    "blocks": "{% for m in messages %}\n    {% if m.content %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\nz\n",
    "JSON": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ tools | tojson(true, none, none, true) }}",
    "generation": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "special tokens": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ sep_token is defined }}",
    "variables": "{{ enable_thinking }}|{{ tools is none }}|{{ documents is none }}|{{ add_generation_prompt }}",
    "thinking": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.keys() | list }}{% endfor %}",
    "namespaces": "{% set n = namespace(self=1, b=dict(c=2)) %}{% set n.d = n.b.c + n.self %}{{ n.d }}",
    "keys": "{{ dict.fromkeys('ab') }}{{ dict.fromkeys('c', 1) }}",
    "the date": "{{ strftime_now('%Y')[:2] }}",
    "refusal": "{{ raise_exception('only one message') if messages | length > 1 }}",
    "a syntax error": "{% for %}",
    "an unknown name": "{{ nothing.at_all }}",
    "an underscore": "{% set n = namespace(_a=1) %}",
    "another underscore": "{% set n = namespace() %}{% set n._a = 1 %}",
    "out of the sandbox": "{{ ''.__class__.__mro__ }}",
    "a change of messages": "{{ messages.append(1) }}",
    "a sum": "{{ messages[0].content + 1 }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    return load_tokenizer(ModelConfig())


@pytest.fixture(scope="module")
def ours(embedded_file: Path) -> FileTokenizer:
    return gguf_tokenizer(GgufFile(embedded_file))


def definition(tokenizer: Any) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return parts


def assert_same(ours: FileTokenizer, theirs: Any) -> None:
    """What this package asks a tokenizer."""
    assert definition(ours) == definition(theirs)
    assert len(ours) == len(theirs)
    assert ours
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert ours.chat_template == theirs.chat_template
    numbers = range(len(theirs) + 1)
    assert ours.convert_ids_to_tokens(numbers) == theirs.convert_ids_to_tokens(numbers)
    for text in TEXTS:
        for add in (True, False):
            tokens = ours(text, add_special_tokens=add)["input_ids"]
            assert tokens == theirs(text, add_special_tokens=add)["input_ids"]
        for skip in (True, False):
            assert ours.decode(tokens, skip_special_tokens=skip) == theirs.decode(tokens, skip_special_tokens=skip)


def rendered(tokenizer: Any, messages: Any, **more: Any) -> Any:
    """The text, or that the template fails."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **more)
    except (TemplateError, TypeError):  # ours is always the first
        return TemplateError


class TestEmbedded:
    def test_it_is_the_tokenizer_of_transformers(self, ours: FileTokenizer, theirs: Any) -> None:
        assert_same(ours, theirs)

    @pytest.mark.exhaustive
    def test_it_is_what_transformers_makes_of_the_file(self, ours: FileTokenizer, embedded_file: Path) -> None:
        """transformers knows no pre-tokenizer of this name, and takes GPT-2's."""
        folder, name = embedded_file.parent, embedded_file.name
        expected = definition(PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name)) | {"pre_tokenizer": None}
        assert definition(ours) | {"pre_tokenizer": None} == expected

    @in_turn("name", TEMPLATES)
    def test_templates(self, name: str, ours: FileTokenizer, theirs: Any) -> None:
        template = TEMPLATES[name] or theirs.chat_template
        first = FileTokenizer(ours.backend_tokenizer, ours.special_tokens_map, template)
        for messages in (CHAT, LONGER):
            for more in (
                {},
                {"add_generation_prompt": True},
                {"tools": TOOLS, "enable_thinking": False},
                {"bos_token": "another"},
            ):
                expected = rendered(theirs, messages, chat_template=template, **more)
                assert rendered(first, messages, **more) == expected

    def test_prompts(self, ours: FileTokenizer, theirs: Any) -> None:
        for text in (*filter(str.strip, TEXTS[::3]), "<|im_start|>system\n"):
            first, second = (ChatTemplate(tokenizer, "Be <|im_end|> brief.", (2,)) for tokenizer in (ours, theirs))
            assert first.first_turn(text) == second.first_turn(text)
            assert first.next_turn(text, ended=True) == second.next_turn(text, ended=True)
            assert first.reply(text) == second.reply(text)

    def test_conversations(self, ours: FileTokenizer, theirs: Any) -> None:
        """Everything in a session that asks the tokenizer, down to the words of the vocabulary and to cut texts."""

        def said(tokenizer: Any) -> tuple[Any, ...]:
            model = make_llama(vocab=len(tokenizer))
            with Engine(model, tokenizer, CacheConfig(window=64), SamplingConfig(0, max_tokens=8)) as engine:
                conversation = Conversation(engine, "Be brief.", recall=RecallConfig("auto"))
                for text in ("My cat is called Tom.", "Who is Tom? 🙂"):
                    list(conversation.say(text))
                span = TurnSpan(1, 0, len(engine.tokens))
                terms = TermWeights(tokenizer, engine.served.read_embeddings)
                return (
                    *(list(engine.tokens), engine.end_tokens, retention(engine, [span]), Cliff.of(conversation).text),
                    *(terms.weight("cat"), terms.related(["cat"], 3), decode(tokenizer, engine.tokens)),
                )

        assert said(ours) == said(theirs)


class TestGguf:
    def write(self, path: Path, tokens: list[str], types: list[int], pre: str = "gpt-2", **keys: Any) -> None:
        """A file with this vocabulary. Keys are numbers of special tokens, and whether they are added."""

        def write_tokens(writer: Any, pre: str) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(tokens)
            writer.add_token_types(types)
            writer.add_token_merges(MERGES)
            for key, value in keys.items():
                getattr(writer, f"add_{key}")(value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf_files, "write_tokens", write_tokens)
            write_model(path, make_llama(), "llama", pre=pre)

    def test_a_small_file(self, small: Path) -> None:
        tokenizer = gguf_tokenizer(GgufFile(small))
        assert_same(tokenizer, load_tokenizer(ModelConfig(str(small))))
        assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def test_tokens_of_other_letters(self, tmp_path: Path) -> None:
        """Control tokens such as DeepSeek's, and runs of spaces, are whole and have their own numbers."""
        tokens = ["<unk>", "<｜begin▁of▁text｜>", "</s>", *TOKENS[3:33], "ĠĠĠ", "   ", "日", "本"]
        types = [3, 3, 1, *[1] * 30, 1, 4, 1, 3]
        self.write(tmp_path / "a.gguf", tokens, types, bos_token_id=1, eos_token_id=2, add_bos_token=True)
        tokenizer = gguf_tokenizer(GgufFile(tmp_path / "a.gguf"))
        assert_same(tokenizer, load_tokenizer(ModelConfig(str(tmp_path / "a.gguf"))))
        assert tokenizer("<｜begin▁of▁text｜>the   an本</s>")["input_ids"] == [1, 1, 31, 34, 32, 36, 2]
        assert tokenizer.decode([1, 31, 34, 32, 35, 36, 2]) == "<｜begin▁of▁text｜>the   an日本</s>"
        assert tokenizer.decode([1, 31, 34, 32, 35, 36, 2], skip_special_tokens=True) == "the   an日"
        assert len(tokenizer) == len(tokens)
        assert (tokenizer.eos_token_id, tokenizer.chat_template) == (2, None)

    @pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("qwen35", True), ("llama-bpe", False)])
    def test_text_of_qwen_is_composed(self, pre: str, composed: bool, tmp_path: Path) -> None:
        self.write(tmp_path / "a.gguf", ["Ã", "©", *TOKENS], [1] * (len(TOKENS) + 2), pre)
        tokenizer = gguf_tokenizer(GgufFile(tmp_path / "a.gguf"))
        assert (tokenizer("e\u0301")["input_ids"] == [0, 1]) == composed

    @pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen", "llama-bpe"])
    def test_of_qwen_with_transformers(self, pre: str, tmp_path: Path) -> None:
        """transformers' automatic class takes Qwen2's own way to split text for any model of this type."""
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = transformers.Qwen2Config(vocab_size=64, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
        path = tmp_path / "qwen.gguf"
        write_model(path, transformers.Qwen2ForCausalLM(config), "qwen2", pre=pre)
        ours = gguf_tokenizer(GgufFile(path))
        assert_same(ours, load_tokenizer(ModelConfig(str(path))))

    @pytest.mark.parametrize(("more", "words"), [
        ({"bos_token_id": 64}, "tokenizer.ggml.bos_token_id is 64, not one of 64 tokens"),
        ({"token_merges": ["t h", "the"]}, "not enough values"),
        ({"token_merges": ["t q q"]}, "too many values"),
        ({"token_merges": ["t ☃"]}, "Token `☃` out of vocabulary"),
    ])  # fmt: skip
    def test_damaged_ones(self, more: dict[str, Any], words: str, tmp_path: Path) -> None:
        self.write(tmp_path / "bad.gguf", TOKENS, [1] * 64, **more)
        with pytest.raises(ModelNotFoundError, match=f"bad.gguf is damaged .*{words}") as error:
            gguf_tokenizer(GgufFile(tmp_path / "bad.gguf"))
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["tokens", "merges"])
    def test_without_a_vocabulary(self, name: str, small: Path, tmp_path: Path) -> None:
        content = small.read_bytes().replace(f"ggml.{name}".encode(), f"ggml.{name[::-1]}".encode())
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(ModelNotFoundError, match=f"bad.gguf is damaged .*: it has no tokenizer.ggml.{name}"):
            gguf_tokenizer(GgufFile(tmp_path / "bad.gguf"))

    @pytest.mark.parametrize(("family", "kind"), [
        ("llama", "llama"), ("phi3", "llama"), ("gemma3", "llama"), ("gemma4", "gemma4"),
    ])  # fmt: skip
    def test_sentencepiece(self, family: str, kind: str, tmp_path: Path, own_cache: Path) -> None:
        """Pieces are merged as transformers merges them, where tokens have types and many merges are possible."""
        self.write_pieces(tmp_path / "spm.gguf", family, kind)
        architecture, vocabulary, settings = get_gguf_tokenizer(str(tmp_path / "spm.gguf"))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
        theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
        ours = gguf_tokenizer(GgufFile(tmp_path / "spm.gguf"))
        assert_same(ours, theirs)
        assert ours.decode(ours("the  an", add_special_tokens=False)["input_ids"]) == "the  an"

    def write_pieces(self, path: Path, family: str, kind: str) -> None:
        letters = [*"abdehnorstuy", "▁"]
        pairs = [first + second for first in letters for second in letters]
        pieces = [*letters, *pairs, *(f"{first}{second}" for first in pairs[::3] for second in pairs[::5])]
        special = ["<unk>", "<bos>", "<eos>", "<pad>", "<mask>"] if "gemma" in family else ["<unk>", "<s>", "</s>"]
        tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "\n\n", "<turn>", *dict.fromkeys(pieces)]
        types = [2, *[3] * (len(special) - 1), *[6] * 256, 4, 3, *[1] * (len(tokens) - 258)]
        tokens = special + tokens
        writer = gguf.GGUFWriter(path, family)
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_scores([-float(7 * number % 101) for number in range(len(tokens))])
        if kind == "gemma4":
            writer.add_token_merges([" ".join(pair) for pair in pairs])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_tensor("token_embd.weight", numpy.zeros((1, 32), numpy.float32))
        gguf_files.finish(writer)

    def test_one_that_takes_long_is_kept(
        self, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write_pieces(tmp_path / "spm.gguf", "llama", "llama")
        monkeypatch.setattr(gguf_pieces, "LONG_S", 0.0)
        first = gguf_tokenizer(GgufFile(tmp_path / "spm.gguf"))
        monkeypatch.setattr(gguf_pieces, "_made", pytest.fail)
        assert definition(gguf_tokenizer(GgufFile(tmp_path / "spm.gguf"))) == definition(first)

    @pytest.mark.parametrize(("kind", "error", "words"), [
        ("rwkv", UnsupportedModelError, "spm.gguf has a vocabulary of the kind 'rwkv'"),
        ("llama", ModelNotFoundError, "neither tokenizer.ggml.scores nor tokenizer.ggml.merges"),
    ])  # fmt: skip
    def test_other_vocabularies(self, kind: str, error: type[Exception], words: str, tmp_path: Path) -> None:
        self.write_pieces(tmp_path / "spm.gguf", "llama", kind)
        content = (tmp_path / "spm.gguf").read_bytes().replace(b"ggml.scores", b"ggml.shares")
        (tmp_path / "spm.gguf").write_bytes(content)
        with pytest.raises(error, match=words):
            gguf_tokenizer(GgufFile(tmp_path / "spm.gguf"))

    def test_without_a_template(self, ours: FileTokenizer) -> None:
        plain = FileTokenizer(ours.backend_tokenizer, ours.special_tokens_map, None)
        with pytest.raises(ValueError, match="no chat template"):
            plain.get_chat_template()
        tokenizer, stops = with_template(plain)
        assert (tokenizer.get_chat_template(), stops) == (FALLBACK_TEMPLATE, ("\nUser:",))
        assert with_template(ours) == (ours, ())
