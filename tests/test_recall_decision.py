"""What is found for a message, and what is not."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from h2o_stream.loading.transformers_model import LoadedModel
from h2o_stream.recall.decision import decide
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Candidate, Passage
from h2o_stream.recall.passages import split
from h2o_stream.recall.speech import first_person, is_question, owners
from h2o_stream.recall.terms import TermWeights, words

PASTE = "\n\n".join(
    f"Paragraph {i} of the annual report says that the company in Vienna sold {i * 37} machines, more than the year "
    "before, and that its dog food business and its flight school were closed because of the weather."
    for i in range(6)
)


class Chat:
    """An index that is filled turn by turn; every character is a token."""

    def __init__(self, terms: TermWeights) -> None:
        self.index, self.terms, self.turn, self.length = PassageIndex(None), terms, 0, 0

    def say(self, prompt: str, reply: str = "Thank you, I will remember that.") -> None:
        self.turn += 1
        passages = []
        for role, text in (("user", prompt), ("assistant", reply)):
            for part in split(text):
                start, self.length = self.length, self.length + len(part)
                said = text[part.start : part.stop]
                passages.append(Passage(self.turn, "user" if role == "user" else "assistant", said, start, self.length))
        self.index.add(self.turn, prompt, reply, passages)

    def ask(
        self, message: str, budget: int = 400, held: Callable[[int, int], float] = lambda start, stop: 0.0
    ) -> list[Candidate]:
        return decide(message, self.index, self.terms, held, budget, 2 * budget, len, self.answer)

    def answer(self, question: str) -> Passage | None:
        """What is found in other words: nothing."""

    def recalled(self, message: str) -> list[str]:
        return [item.excerpt for item in self.ask(message) if item.verdict == "recalled"]


def reader(embeddings: torch.nn.Module) -> Any:
    return lambda ids: embeddings(torch.from_numpy(ids)).numpy()


@pytest.fixture(scope="module")
def tokenizer(served_embedded: LoadedModel) -> Any:
    """Uses the whole vocabulary: word weights depend on its order."""
    return served_embedded.tokenizer


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerBase) -> Iterator[Chat]:
    """By words alone."""
    chat = Chat(TermWeights(tokenizer))
    yield chat
    chat.index.close()


def test_words_keep_numbers_and_drop_clitics() -> None:
    text = "What's the IP, 10.0.42.17, at 7:40? My sister-in-law's B12. Größe"
    assert " ".join(words(text)) == "what the ip 10.0.42.17 at 7:40 my sister in law b12 grösse"


def test_scripts_without_spaces_become_pairs() -> None:
    assert words("我的猫 B12") == ["我的", "的猫", "b12"]


def test_first_person() -> None:
    assert all(map(first_person, ("What is my job?", "Wo ist mein Hund?", "Où est ma clé ?", "我的猫呢？")))
    assert not any(map(first_person, ("What is an immigrant?", "Tell me a joke", "Who mined it?")))


def test_rare_words_weigh_more(tokenizer: PreTrainedTokenizerBase) -> None:
    weight = TermWeights(tokenizer).weight
    assert (
        weight("what") <= weight("the") < weight("job") < weight("gate") < weight("nightingale") == weight("4821") == 1
    )
    assert weight("hello") == weight("remember") == 0


@given(text=st.text(max_size=40))
def test_every_word_has_a_weight(related: TermWeights, text: str) -> None:
    assert all(0 <= related.weight(word) <= 1 for word in words(text))


def test_related_words(related: TermWeights) -> None:
    near = related.related(["pet", "spouse", "xqzzk"], 20)
    assert {"dog", "cat"} <= set(near["pet"])
    assert {"wife", "husband"} <= set(near["spouse"])
    assert "xqzzk" not in near
    similarity = related.similarity(["pet", "xqzzk"], ["cat", "gate", "xqzzk"])
    assert similarity[0, 0] > 0.25 > 0.15 > similarity[0, 1]
    assert not similarity[1].any()


@pytest.mark.exhaustive
def test_wide_embeddings_are_projected(tokenizer: PreTrainedTokenizerBase) -> None:
    wide = torch.nn.Embedding(len(tokenizer), 1100)
    terms = TermWeights(tokenizer, reader(wide))
    assert np.allclose(terms.similarity(["dog", "cat"], ["dog", "cat"]).diagonal(), 1, atol=1e-2)
    assert len(terms.related(["dog"], 3)["dog"]) == 3


GATE, SISTER = "The code of the garden gate is 4821.", "My sister Clara works as a dentist in Porto."
CAT = "My cat is called Biscuit and he is nine years old."
JUDGE = 'The judge, who denied them bail, was Maria Ciesil, and she asked: "Where was your sense of decency?"'
GERMAN, FRENCH = "Meine Schwester Clara arbeitet als Zahnärztin.", "Ma sœur Camille habite à Lyon depuis trois ans."
CHINESE = "我的航班周四早上七点起飞。"


@pytest.mark.parametrize(("turns", "question", "recalled"), [
    ([GATE, SISTER, PASTE], "What is the code of the garden gate?", [GATE]),
    ([GATE, SISTER, PASTE], "What does my sister Clara work as?", [SISTER]),
    ([CAT, PASTE], "When does the museum in Lisbon open?", []),
    ([CAT, PASTE], "Write a short story about a lighthouse keeper.", []),
    ([CAT, GATE], f"{PASTE}\n\nWhat is my cat called?", [CAT]),
    ([("Which river flows through Graz?", "It must be the Mur.")], "What river flows through Graz?",
     ["It must be the Mur."]),
    ([("The password of the library", "The password of the library?")], "What is the password of the library?", []),
    ([JUDGE], "Which judge denied them bail?", [JUDGE]),
    ([GERMAN, PASTE], "Wo arbeitet meine Schwester Clara?", [GERMAN]),
    ([FRENCH, PASTE], "Où habite ma sœur Camille ?", [FRENCH]),
    ([CHINESE, PASTE], "我的航班几点起飞？", [CHINESE]),
])  # fmt: skip
def test_found_in_the_same_words(
    chat: Chat, turns: list[str | tuple[str, str]], question: str, recalled: list[str]
) -> None:
    for turn in turns:
        chat.say(*([turn] if isinstance(turn, str) else turn))
    assert chat.recalled(question) == recalled


class CodeTokenizer:
    """Has the ids that Qwen 2.5 has for some words; the rest of its vocabulary is empty."""

    ids = {"is": 374, "name": 829, "my": 847, "a": 264, "what": 1128, "where": 1380, "explain": 10339}
    all_special_ids = ()

    def __len__(self) -> int:
        return 151_936

    def convert_ids_to_tokens(self, ids: range) -> list[str | None]:
        tokens: list[str | None] = [None] * len(ids)
        for word, token in self.ids.items():
            tokens[token] = f"Ġ{word}"
        return tokens


def test_a_vocabulary_of_code() -> None:
    """Regression: in those of Qwen "name" is as common as "the", and "what" is not: a real model was asked for a name,
    and got whatever had "what" in it.
    """
    chat = Chat(TermWeights(CodeTokenizer()))
    chat.say("My name is Maria.")
    chat.say("Explain what a map is.", "It has keys.")
    assert chat.recalled("What is my name?") == ["My name is Maria."]
    assert chat.recalled("What?") == []
    chat.index.close()


@pytest.mark.parametrize(("fact", "later", "question"), [
    ("My name is Maria.", "Suggest a name for a small café by the sea.", "What is my name?"),
    ("My name is Maria.", "Come up with a name for my new boat.", "What's my name?"),
    ("My name is Maria.", "My dog's name is Rex.", "What is my name?"),
    ("My name is Maria.", "The name of my street is Lilac Road.", "What is my name?"),
    ("My wife's birthday is on the 2nd of March.", "My birthday is on the 4th of May.", "When is my wife's birthday?"),
    ("My shoe size is 43.", "Explain why a shoe needs laces.", "What is my shoe size?"),
])  # fmt: skip
def test_neither_tasks_nor_what_others_have_replaces_a_fact(chat: Chat, fact: str, later: str, question: str) -> None:
    """Regression: the name of the dog, or of a café, was taken for the user's new name. Also, a number below 100 was no
    answer.
    """
    chat.say(fact)
    chat.say(later)
    assert chat.recalled(question) == [fact]


def test_owners() -> None:
    assert owners("What's my phone number?") == {"phone": "", "number": ""}
    assert owners("It's the name of my dog\u2019s vet.") == {"name": "vet"}
    assert owners("Der Name meines Hundes") == {"name": "hundes"}
    assert owners("Le nom de mon chien, le nom du chien") == {"nom": "chien"}
    assert owners("dog of " * 10_000)


def test_a_task_is_no_answer(chat: Chat) -> None:
    chat.say("Suggest a name for a café.")
    assert chat.recalled("What is my name?") == []


def test_what_another_has_may_be_no_answer(chat: Chat) -> None:
    chat.say("My dog's name is Rex.")
    (candidate,) = chat.ask("What is my name?")
    assert (candidate.verdict, candidate.sure) == ("recalled", False)


@pytest.mark.parametrize(("fact", "question"), [
    (CAT, "How is my pet named?"),
    ("My wife Ana is a nurse.", "What does my spouse do?"),
    ("The ferry to Gotland costs 62 euros, and we take it on Monday.", "What is the price of our boat?"),
])  # fmt: skip
def test_found_in_other_words(related: TermWeights, fact: str, question: str) -> None:
    chat = Chat(related)
    chat.say(fact)
    chat.say(PASTE, "Interesting.")
    assert chat.recalled(question)[:1] == [fact]
    chat.terms = TermWeights(related._tokenizer)
    assert not chat.recalled(question), "words alone find it, so this tests nothing"


@pytest.mark.parametrize(
    "message", ["", "?", "hi", "Thanks!", "ok", "go on", "Tell me a joke", "Please remember this.", "你好", "x" * 5000]
)
def test_small_talk_recalls_nothing(chat: Chat, message: str) -> None:
    chat.say("Hello! Please remember what I tell you.", "Of course, thanks! I know a good joke.")
    chat.say("Tell me a joke, please, then go on.", "No joke today, thanks.")
    assert not chat.recalled(message)


def test_newest_of_contradicting_facts_is_first(chat: Chat) -> None:
    chat.say("My best friend Tomasz moved to Toronto last year.")
    chat.say("Tomasz moved again, he lives in Halifax now.")
    assert chat.recalled("Where did my best friend Tomasz move?")[0].startswith("Tomasz moved again")


def test_what_is_held_is_not_read_again(chat: Chat) -> None:
    chat.say("My boss is called Margarethe Lindqvist.")
    asked: list[tuple[int, int]] = []

    def held(start: int, stop: int) -> float:
        asked.append((start, stop))
        return 0.95

    (candidate,) = chat.ask("What is my boss called?", held=held)
    assert candidate.verdict == "still held"
    assert candidate.held == 0.95
    assert asked == [(candidate.passage.start, candidate.passage.stop)]


def test_excerpts_keep_to_the_budget(chat: Chat) -> None:
    chat.say(
        "We had a long day and the weather was bad. My boss is called Margarethe Lindqvist. She likes short reports. "
        "After work we went home and cooked something that nobody liked very much."
    )
    question = "What is my boss called?"
    excerpts = {budget: chat.ask(question, budget)[0] for budget in (20, 40, 140, 1000)}
    assert excerpts[20].verdict == "recalled", "the best one is, even beyond the budget"
    assert excerpts[40].excerpt == "My boss is called Margarethe Lindqvist."
    assert excerpts[140].excerpt == "My boss is called Margarethe Lindqvist. She likes short reports."
    assert excerpts[1000].excerpt == excerpts[1000].passage.text
    assert all(item.tokens == len(item.excerpt) for item in excerpts.values())


def test_a_sentence_longer_than_what_may_be_read_is_cut_around_what_was_asked_for(chat: Chat) -> None:
    chat.say(
        "All these days we had so much to do that I forgot to say that my boss is called Margarethe Lindqvist now."
    )
    best = chat.ask("What is my boss called?", budget=30)[0]
    assert best.verdict == "recalled"
    assert "boss is called" in best.excerpt
    assert len(best.excerpt) <= 60


def test_what_the_user_said_goes_before_what_the_model_said(chat: Chat) -> None:
    question = "Who set the wooden ship on fire at the harbour?"
    reply = "Pirates set the wooden ship on fire at the harbour."
    chat.say(question, reply)
    assert chat.recalled(question) == [reply]
    chat.say("Late at night the old captain set the ship on fire at the harbour.")
    candidates = chat.ask(question)
    assert [item.passage.role for item in candidates if item.verdict == "recalled"] == ["user"]
    assert "said by the model" in {item.verdict for item in candidates}


def test_all_that_is_recalled_keeps_to_the_budget(chat: Chat) -> None:
    """Four cousins with so much of their own that none takes the place of another."""
    for name, place, job in (
        ("Annabelle", "railway station", "sells antique clocks"),
        ("Bertram", "maritime museum", "repairs violins"),
        ("Carlotta", "fishing harbour", "breeds alpacas"),
        ("Dorothea", "old cemetery", "translates Hungarian poetry"),
    ):
        chat.say(f"My cousin {name} lives near the {place} and {job}.")
    candidates = chat.ask("Where does my cousin live?", budget=160)
    assert {item.verdict for item in candidates} == {"recalled", "no room"}
    assert sum(item.tokens for item in candidates if item.verdict == "recalled") <= 160


def test_the_older_of_two_statements_is_outdated(chat: Chat) -> None:
    chat.say(GATE)
    chat.say("My neighbour opened the garden gate.")
    chat.say("The code of the garden gate has changed, it is 7755 now.")
    verdicts = {item.excerpt: item.verdict for item in chat.ask("What is the code of the garden gate?")}
    assert verdicts["The code of the garden gate has changed, it is 7755 now."] == "recalled"
    assert verdicts[GATE] == "outdated"


def test_what_repeats_a_statement_is_not_read_as_well(chat: Chat) -> None:
    chat.say("The code of the garden gate is 4821.", "Thank you! The code of the garden gate is 4821.")
    chat.say(GATE)
    candidates = chat.ask("What is the code of the garden gate?")
    assert [item.verdict for item in candidates] == ["recalled", "repeated", "loosely related"]


def test_what_only_touches_the_subject_replaces_nothing(chat: Chat) -> None:
    chat.say(SISTER)
    chat.say("I met my sister for lunch yesterday.")
    assert SISTER in chat.recalled("What is my sister's job?")


def test_candidates_are_few_and_scored(chat: Chat) -> None:
    for i in range(20):
        chat.say(f"My cousin number {i + 1000} lives in house {i + 5000}.")
    candidates = chat.ask("Where does my cousin live?")
    assert len(candidates) == 12
    assert all(0 <= item.score <= 1.001 and "cousin" in item.terms for item in candidates)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Why?", True), ('"Why?" \n', True), ("(Why ?)", True), ("为什么？", True), ("Why? No.", False), ("", False)],
)
def test_questions(text: str, expected: bool) -> None:
    assert is_question(text) == expected


def test_long_texts_are_no_questions_soon() -> None:
    """Backtracking would take hours."""
    assert not is_question("?" + " " * 3_000_000 + "x")


class TestOtherWords:
    """What somebody else finds for a question, after words have found nothing."""

    @pytest.fixture
    def asked(self, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        asked: list[str] = []
        chat.say("Is it late? I am allergic to peanuts. They make me ill.")
        chat.say("The gate is green.")
        passage = Passage(1, "user", "Is it late? I am allergic to peanuts. They make me ill.", 0, 55)
        monkeypatch.setattr(chat, "answer", lambda question: asked.append(question) or passage)
        return asked

    def test_it_is_read_if_the_user_asks_about_themselves(self, chat: Chat, asked: list[str]) -> None:
        (best, *_) = chat.ask("Which food must I avoid?")
        assert (best.verdict, best.score, best.terms) == ("recalled", 0.0, ())
        assert best.excerpt == "Is it late? I am allergic to peanuts. They make me ill."
        assert asked == ["Which food must I avoid?"]

    def test_what_is_still_held_is_not_read(self, chat: Chat, asked: list[str]) -> None:
        (best, *_) = chat.ask("Which food must I avoid?", held=lambda start, stop: 1.0)
        assert best.verdict == "still held"

    @pytest.mark.parametrize("message", ["Which food is healthy?", "I like food.", "What am I allergic to?"])
    def test_it_is_not_asked_for_otherwise(self, message: str, chat: Chat, asked: list[str]) -> None:
        chat.ask(message)
        assert not asked
