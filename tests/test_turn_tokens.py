"""Turns end, begin and are framed as templates say, whatever the metadata of files says."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Conversation, Engine, SamplingConfig
from h2o_stream.engine.text import TextStream
from h2o_stream.models.file_tokenizers import file_tokenizer
from h2o_stream.models.generation_config import GenerationConfig, read_generation_config
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.templates import with_template
from h2o_stream.models.turn_tokens import BEGINNINGS, end_tokens, with_bos
from h2o_stream.session.template import ChatTemplate
from h2o_stream.session.turn import Turn
from tests.gguf_files import finish
from tests.published_templates import FAMILIES, Family

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "< /", "Ġ the"]
WORDS = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
MODEL, BOS, EOS, ADDS = "gpt2", "bos_token_id", "eos_token_id", "add_bos_token"


@dataclass(frozen=True)
class Metadata:
    """What a file says of its tokens. Keys are those of ``tokenizer.ggml``."""

    tokens: list[str]
    types: list[int] | None
    pre: str
    template: str | None
    keys: dict[str, int | bool]

    def with_types(self, kind: int) -> "Metadata":
        """The same, with control tokens of another type."""
        return replace(self, types=[NORMAL] * len(WORDS) + [kind] * (len(self.tokens) - len(WORDS)))

    def with_keys(self, **keys: int | bool | None) -> "Metadata":
        """The same with other keys; None for none."""
        return replace(self, keys={name: value for name, value in (self.keys | keys).items() if value is not None})


def published(family: Family) -> Metadata:
    """A file as its makers wrote it."""
    controls = dict.fromkeys((family.bos, *family.ends, *family.markers, family.eos, *family.others))
    tokens = [*WORDS, *filter(None, controls)]
    keys: dict[str, int | bool] = {EOS: tokens.index(family.eos or family.ends[0]), ADDS: family.adds_bos}
    if family.bos:
        keys[BOS] = tokens.index(family.bos)
    return Metadata(tokens, [], family.pre, family.template, keys).with_types(CONTROL)


WORD = WORDS.index("the")
CHANGES: dict[str, Callable[[Metadata], Metadata]] = {
    "as it was published": lambda file: file,
    "no eos": lambda file: file.with_keys(eos_token_id=None),
    "eos is a word": lambda file: file.with_keys(eos_token_id=WORD),
    "eos is another token": lambda file: file.with_keys(eos_token_id=len(file.tokens) - 1),
    "eos is the beginning": lambda file: file.with_keys(eos_token_id=file.keys.get(BOS)),
    "no bos": lambda file: file.with_keys(bos_token_id=None),
    "bos is a word": lambda file: file.with_keys(bos_token_id=WORD),
    "nothing about bos": lambda file: file.with_keys(add_bos_token=None),
    "no types": lambda file: replace(file, types=None),
    "of type normal": lambda file: file.with_types(NORMAL),
    "of type user defined": lambda file: file.with_types(USER_DEFINED),
    "padding is a word": lambda file: file.with_keys(padding_token_id=WORD, unknown_token_id=WORD + 1),
    "eot is eos": lambda file: file.with_keys(eot_token_id=file.keys[EOS]),
    "eot is a word": lambda file: file.with_keys(eot_token_id=WORD, eom_token_id=WORD),
    "of type normal, eos is a word": lambda file: file.with_types(NORMAL).with_keys(eos_token_id=WORD),
    "another pre-tokenizer": lambda file: replace(file, pre="default"),
    "no template": lambda file: replace(file, template=None),
}


SENTENCEPIECE = ("as it was published", "no bos", "nothing about bos", "no eos", "eos is a word", "of type normal")


def write(file: Metadata, path: Path, sentencepiece: bool = False) -> Path:
    """A GGUF file without weights, in whose vocabulary either merges or scores say how text is read."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_token_list(file.tokens)
    if sentencepiece:
        for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
            writer.add_uint32(f"llama.{name}", 1)
        writer.add_head_count(1)
        writer.add_token_scores([-float(number) for number in range(len(file.tokens))])
    else:
        writer.add_tokenizer_pre(file.pre)
        writer.add_token_merges(MERGES)
    if file.types is not None:
        writer.add_token_types(file.types)
    if file.template is not None:
        writer.add_chat_template(file.template)
    for name, value in file.keys.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", numpy.zeros((1, 32), numpy.float32))
    finish(writer)
    return path


def write_folder(file: Metadata, path: Path, folder: Path) -> Path:
    """The same in transformers' format, in which only the generation config may take a word for the end."""
    made: Any = file_tokenizer(GgufFile(write(file, path)))
    folder.mkdir(exist_ok=True)
    made.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}, "chat_template": file.template}
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": "padding_token_id"}
    named = {name: file.tokens[file.keys[key]] for name, key in named.items() if file.keys.get(key, WORD) != WORD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | named))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": file.keys.get(EOS)}))
    return folder


def check(family: Family, file: Metadata, source: Any, adds_bos: bool) -> None:
    """Check what is promised of a file."""
    tokenizer, stops = with_template(file_tokenizer(source))
    numbers = {token: number for number, token in enumerate(file.tokens)}
    ends = end_tokens(read_generation_config(source), tokenizer)
    markers = {numbers[token] for token in family.markers if token in numbers}
    assert ends & {numbers[token] for token in family.ends[: 1 if file.template else None]}
    assert not markers & ends - {file.keys.get(EOS)}
    template = ChatTemplate(tokenizer, None, ends)
    first, then = template.first_turn("the end"), template.next_turn("the end", ended=False)
    own = [*markers, *(numbers[token] for token in family.ends)]
    if file.template is not None:
        assert not stops
        rendered = tokenizer.decode([*first.tokens, *then.tokens])
        for number in own:
            assert [*first.tokens, *then.tokens].count(number) == rendered.count(file.tokens[number])
    if file.template is not None and file.keys.get(EOS) != file.keys.get(BOS, -1) and family.bos not in family.markers:
        check_begin(family, file, first.tokens, adds_bos)
    ended = template.next_turn("the end", ended=True)
    assert then.tokens[-len(ended.tokens) :] == ended.tokens
    typed = "".join(file.tokens[number] for number in own) + family.bos
    assert template.first_turn(typed).tokens != first.tokens
    for tokens, harmless in ((template.first_turn(typed), first), (template.next_turn(typed, False), then)):
        assert [token for token in tokens.tokens if token in own] == [
            token for token in harmless.tokens if token in own
        ]
    text = TextStream(tokenizer)
    if file.template is not None and file.types != file.with_types(USER_DEFINED).types:
        assert not "".join(map(text.push, markers & {*first.tokens}))
    assert text.push(WORD) == "the"
    assert WORD not in {*ends, *tokenizer.all_special_ids}


def check_begin(family: Family, file: Metadata, tokens: list[int], adds_bos: bool) -> None:
    """Check that a conversation begins with the token for it, once, if the file or the template says so."""
    found = [number for number in tokens if file.tokens[number] in (*BEGINNINGS, family.bos)]
    known = family.bos in BEGINNINGS or file.keys.get(BOS) == file.tokens.index(family.bos or WORDS[0])
    written = bool(family.bos) and ("bos_token" in family.template or family.bos in family.template)
    assert len(found) == (known and (written or adds_bos))
    assert tokens[: len(found)] == found


def adds(family: Family, file: Metadata) -> bool:
    """Whether a file adds the token that begins texts; the default is llama.cpp's."""
    return bool(file.keys.get(ADDS, file.pre in ("llama-bpe", "tekken", "falcon3"))) and bool(family.bos)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_file(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for change, changed in CHANGES.items():
        file = changed(published(family))
        try:
            check(family, file, GgufFile(write(file, tmp_path / "a.gguf")), adds(family, file))
        except AssertionError as error:
            error.add_note(change)
            raise


@pytest.mark.every(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for change in ("as it was published", "no eos", "eos is a word", "nothing about bos"):
        file = CHANGES[change](published(family))
        folder = write_folder(file, tmp_path / "a.gguf", tmp_path / "folder")
        check(family, file, folder, adds(family, file))


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["Llama 2", "TinyLlama", "Gemma", "Phi 3"])
def test_a_file_with_scores(name: str, tmp_path: Path, own_cache: Path) -> None:
    """Its tokenizer begins texts unless the file says that it does not."""
    family = FAMILIES[name]
    for number, change in enumerate(SENTENCEPIECE):
        file = CHANGES[change](published(family))
        source = GgufFile(write(file, tmp_path / f"{number}.gguf", sentencepiece=True))
        check(family, file, source, bool(file.keys.get(ADDS, True) and family.bos))


@pytest.mark.every(2)
@pytest.mark.parametrize(("between", "stops"), [
    ("{{ '\\n### ' + m.role }}: ", ("\n### user:",)), (" Human: ", (" Human:",)), ("\n\n", ()), ("", ()),
    ("\n<|im_end|>", ()), ("<x>\ny", ("<x>",)),
])  # fmt: skip
def test_replies_that_no_token_ends(between: str, stops: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> None:
    """They end where the next message begins."""
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = f"{{% for m in messages %}}{between}{{{{ m.content }}}}{{% endfor %}}"
    assert with_template(talking) == (talking, stops)


def test_texts_begin_once(tokenizer: PreTrainedTokenizerBase) -> None:
    """Also those that somebody has typed so, and those after which the tokenizer adds something."""
    talking = copy.deepcopy(tokenizer)
    first, last = talking.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert with_bos(talking, [5, 6]) == [5, 6]
    talking.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", first), ("<|im_end|>", last)]
    )
    for tokens in ([], [5, 6], [last, 5]):
        assert with_bos(talking, tokens) == [first, *tokens]
        assert with_bos(talking, [first, *tokens]) == [first, *tokens]


def test_the_embedded_model_with_another_eos(served_embedded: LoadedModel, tmp_path: Path) -> None:
    """It says no marker, plays nobody else, and a resumed conversation goes on after the same token."""
    tokenizer = copy.deepcopy(served_embedded.tokenizer)
    tokenizer.special_tokens_map["eos_token"] = "<|endoftext|>"
    model = replace(served_embedded.model, generation=GenerationConfig(eos_token_id=0))
    end, start = (tokenizer.backend_tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|im_start|>"))
    state = None
    for text in ("What is the capital of France?", "Thank you."):
        with Engine(model, tokenizer, CacheConfig(window=128), SamplingConfig(0, max_tokens=40)) as engine:
            conversation = Conversation(engine, "Be brief.")
            if state is not None:
                conversation.load_state_dict(state)
            *_, turn = conversation.say(text)
            assert isinstance(turn, Turn)
            assert (turn.finish, "<|" in turn.text, engine.tokens[-1]) == ("stop", False, end)
            state, tokens = conversation.state_dict(), list(engine.tokens)
    assert tokens.count(end) == tokens.count(start) == 5
