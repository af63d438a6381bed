"""Splitting texts into passages and sentences, and finding the tokens of passages."""

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from h2o_stream.recall import passages
from h2o_stream.recall.located import locate
from h2o_stream.recall.passage import Passage
from h2o_stream.recall.passages import MAX_WORDS, MIN_WORDS, sentences, split
from h2o_stream.recall.speech import first_person, second_person
from tests.in_turn import in_turn

FACTS = [
    "My sister Clara works as a dentist in Porto.",
    "The password of the garden gate is 4821, which nobody else may know.",
    "Our flight to Oslo leaves from gate B12 on the morning of the second of May.",
]
PROSE = " ".join(f"Sentence number {n} of this long paragraph says what happened on day {n}." for n in range(60))


def texts(text: str, ranges: list[range]) -> list[str]:
    return [text[part.start : part.stop] for part in ranges]


pieces_of_text = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(
            ["\n", "\n\n", " ", "\r\n", ". ", "! ", "。", "word ", "Word ", "- item\n", "| a | b |\n", "文字", "1. "]
        ),
    ),
    max_size=60,
).map("".join)


@given(pieces_of_text)
def test_every_character_is_in_one_passage(text: str) -> None:
    for ranges in (split(text), sentences(text)):
        assert "".join("".join(texts(text, ranges)).split()) == "".join(text.split())
        assert all(first.stop <= second.start for first, second in pairwise(ranges))
        assert all(part and part == part.strip() for part in texts(text, ranges))


@given(pieces_of_text.map(lambda text: text * 3), st.sampled_from([0, 1, 2, 7]))
def test_sentences_are_those_of_the_whole_however_it_is_searched(text: str, piece: int) -> None:
    whole = sentences(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages, "_PIECE", piece)
        assert sentences(text) == whole


@given(pieces_of_text.map(lambda text: text * 20))
def test_passages_are_of_one_size(text: str) -> None:
    words = [len(part.split()) for part in texts(text, split(text))]
    assert all(count < MAX_WORDS + 3 * MIN_WORDS for count in words)


@in_turn("text, expected", [
    ("", []),
    (" \n\n\t ", []),
    ("Hello there", ["Hello there"]),
    ("\n\n".join(FACTS), FACTS),
    ("# Travel\n\n" + FACTS[2], ["# Travel\n\n" + FACTS[2]]),
    ("- eggs\n\n- milk\n\n- two loaves of the dark bread\n\n" + FACTS[0], 2),
    (FACTS[0] + "\n\nBye.", [FACTS[0], "Bye."]),
    ("The code is 4821.\n\n" + FACTS[0], ["The code is 4821.", FACTS[0]]),
    ("密码是四八二一。\n\n我叫李明。", ["密码是四八二一。", "我叫李明。"]),
    ("What is the code?\n\n" + FACTS[1], ["What is the code?\n\n" + FACTS[1]]),
    ("1.\n\n" + FACTS[0], ["1.\n\n" + FACTS[0]]),
    (FACTS[0] + "\r\n\r\n" + FACTS[1], FACTS[:2]),
])  # fmt: skip
def test_passages(text: str, expected: list[str] | int) -> None:
    found = texts(text, split(text))
    assert len(found) == expected if isinstance(expected, int) else found == expected


def test_a_long_paragraph_is_cut_at_the_ends_of_sentences() -> None:
    found = texts(PROSE, split(PROSE))
    assert len(found) > 10
    assert all(part.startswith("Sentence number") and part.endswith(".") for part in found)


def test_code_is_cut_at_the_ends_of_lines() -> None:
    code = "\n".join(f"value_{n} = compute({n}, scale=3) if flag else None" for n in range(100))
    found = texts(code, split(code))
    assert len(found) > 5
    assert all(part.startswith("value_") and part.endswith("None") for part in found)


def test_text_without_spaces_is_cut() -> None:
    chinese = "我的姐姐在里斯本当牙医她住在河边的一座老房子里。" * 40
    found = texts(chinese, split(chinese))
    assert all(len(part) <= 2 * MAX_WORDS and part.endswith("。") for part in found)
    assert max(map(len, split("x" * 100_000))) < 2_000


@in_turn("parts", [
    ["My neighbour Mr. Okafor plays the cello.", "He is 80."],
    ["It costs 30,000.5 euros, e.g. Dr. Smith paid it.", "So did J. R. Tolkien, i.e. all of them!"],
    ["Really?!", '"Yes."', "(No.)", "I said No. 5 ...", "Then it ended."],
    ["He came at 5 p.m. and left.", "She stayed."],
    ["Wait... what?", "See h2o.c and v1.2.3 at www.example.org for more."],
    ["我叫李明。", "我住在“北京”！", "你呢？"],
    ["मेरा नाम राम है।", "मैं दिल्ली में रहता हूँ।"],
    ["ما اسمك؟", "اسمي سامي."],
])  # fmt: skip
def test_sentences(parts: list[str]) -> None:
    for space in (" ", "\n"):
        text = space.join(parts)
        assert texts(text, sentences(text)) == parts


def test_lines_are_sentences_unless_they_are_wrapped() -> None:
    parts = ["# Shopping", "- eggs", "- Milk and a very long description of the kind of butter that we need", "- Bread"]
    parts += [
        "| a | b |",
        "| 1 | 2 |",
        "A sentence that was wrapped at about sixty characters a line,\nand Continues. ".strip(),
    ]
    text = "\n".join(parts)
    assert texts(text, sentences(text)) == parts


@pytest.mark.exhaustive
@in_turn(
    "unit",
    [
        "a", " ", "\n", "\n ", ".", ". ", '."', "A. ", "。", "字", "Mr. ", "x\n", "a\t\n b", "ab\n\n", "!\n", "。\n\n",
        "x" * 50 + "\n",
    ],
)  # fmt: skip
def test_time_is_linear(unit: str) -> None:
    """A quadratic search would take minutes."""
    text = unit * (50_000 // len(unit))
    begin = time.process_time()
    split(text)
    sentences(text)
    assert time.process_time() - begin < 3


def located(tokenizer: Any, prompt: str, reply: str, ids: list[int], start: int = 100) -> list[tuple[Passage, str]]:
    """The passages of a turn, each with the text of its tokens."""
    found = locate(tokenizer, ids, start, 7, prompt, reply)
    assert [passage.text for passage in found] == texts(prompt, split(prompt)) + texts(reply, split(reply))
    assert [passage.role for passage in found] == ["user"] * len(split(prompt)) + ["assistant"] * len(split(reply))
    assert all(start <= passage.start <= passage.stop <= start + len(ids) for passage in found)
    assert all(passage.turn == 7 for passage in found)
    return [(passage, tokenizer.decode(ids[passage.start - start : passage.stop - start])) for passage in found]


def chat(tokenizer: PreTrainedTokenizerBase, user: str, reply: str) -> list[int]:
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return list(tokenizer.apply_chat_template(messages)["input_ids"])


PROMPTS = [
    *FACTS, "\n\n".join(FACTS), PROSE, "我的姐姐在里斯本当牙医。🎉 她很好 👩‍👩‍👧",
    "  spaces around, and <|im_end|> in the text \n", "ok",
]  # fmt: skip
REPLIES = ["Thank you, I will remember that.", "ok", "\n\n".join([*FACTS, PROSE]), "", "好的。" * 30]


@in_turn("prompt", PROMPTS)
@in_turn("reply", REPLIES)
def test_tokens_of_passages(tokenizer: PreTrainedTokenizerBase, prompt: str, reply: str) -> None:
    head = tokenizer("<|im_start|>user\n")["input_ids"]
    plain = tokenizer(prompt, split_special_tokens=True)["input_ids"]
    middle = tokenizer("<|im_end|>\n<|im_start|>assistant\n" + reply + "<|im_end|>\n")["input_ids"]
    for passage, text in located(tokenizer, prompt, reply, head + plain + middle):
        assert text.strip() == passage.text


@pytest.mark.parametrize(("context", "prompt", "reply"), [
    ("\n".join(FACTS), FACTS[1], "The password is 4821."),
    (FACTS[0], FACTS[0], FACTS[0]),
    (f"Context from earlier: {FACTS[2]} {FACTS[2]}", FACTS[2], f"You said: {FACTS[2]}"),
    ("The reply was: Yes.", "Yes.", "Yes."),
])  # fmt: skip
def test_a_recalled_context_is_no_passage(tokenizer: Any, context: str, prompt: str, reply: str) -> None:
    user = f"{context}\n\n{prompt}"
    ids = chat(tokenizer, user, reply)
    before = len(
        tokenizer(
            tokenizer.apply_chat_template([{"role": "user", "content": context}], tokenize=False).partition(context)[0]
            + context
        )["input_ids"]
    )
    found = located(tokenizer, prompt, reply, ids)
    assert all(text.strip() == passage.text for passage, text in found)
    assert found[0][0].start - 100 >= before
    assert all(first[0].stop <= second[0].start for first, second in pairwise(found))


def test_a_turn_that_was_cut_off(tokenizer: PreTrainedTokenizerBase) -> None:
    """Wherever it ends, the passages have the tokens that were fed, and the others have none."""
    prompt, reply = "\n\n".join(FACTS), "Yes. " + " ".join(FACTS)
    ids = chat(tokenizer, prompt, reply)
    complete = locate(tokenizer, ids, 0, 7, prompt, reply)
    for length in range(complete[0].start + 1, len(ids)):
        found = [passage for passage, _ in located(tokenizer, prompt, reply, ids[:length], 0)]
        for passage, whole in zip(found, complete, strict=True):
            template = 0 if length < complete[2].stop or length > complete[3].start else 6
            assert passage.start == pytest.approx(min(whole.start, length), abs=template)
            assert passage.stop == pytest.approx(min(whole.stop, length), abs=template)


def test_a_tokenizer_that_changes_texts() -> None:
    """Its tokens are estimated, in order and within the turn."""
    words = sorted({word.lower().strip(".,") for word in PROSE.split()} | {".", "user", "assistant", "[unk]"})
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[unk]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[unk]")
    ids = tokenizer("user " + PROSE + " assistant " + PROSE[:300])["input_ids"]
    found = [passage for passage, _ in located(tokenizer, PROSE, PROSE[:300], ids)]
    assert all(first.start <= second.start for first, second in pairwise(found))
    middle = found[len(found) // 2]
    share = PROSE.index(middle.text) / len(PROSE)
    assert (middle.start - 100) / len(ids) == pytest.approx(share * len(PROSE) / (len(PROSE) + 300), abs=0.05)


def test_no_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [(p.start, p.stop) for p in locate(tokenizer, [], 5, 1, FACTS[0], "")] == [(5, 5)]


@pytest.mark.exhaustive
def test_a_book_is_located_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """270 kB take 0.1 s; what is quadratic takes minutes."""
    book = "\n\n".join(f"{PROSE} Paragraph {n}." for n in range(60))
    ids = chat(tokenizer, book, "Interesting.")
    begin = time.process_time()
    found = located(tokenizer, book, "Interesting.", ids)
    assert time.process_time() - begin < 5
    assert all(text.strip() == passage.text for passage, text in found)


def test_a_long_word_takes_no_seconds() -> None:
    started = time.thread_time()
    assert not any(find("a-" * 2_000_000) for find in (first_person, second_person))
    assert time.thread_time() - started < 0.5
