"""Tasks after RULER: their items, how they are asked, and what is recorded."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from h2o_lab.ruler.answers import READ, Answer, ask_at_once, ask_in_turns, ask_without_context
from h2o_lab.ruler.items import (
    COMMON_WORDS,
    HOPS,
    NUM_DISTRACTORS,
    TASKS,
    Haystack,
    Item,
    Question,
    make_item,
)
from h2o_lab.ruler.rates import rates
from h2o_stream.base.resources import python_manual
from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.conversation import Conversation
from tests.commands import invoke, records
from tests.fixtures import saved
from tests.in_turn import in_turn
from tests.tolerance import LIKELIHOOD

HAYSTACK = Haystack.of(python_manual(), python_manual())


@pytest.fixture
def count(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def words(text: str) -> int:
    return len(text.split())


class TestItems:
    @in_turn("task", TASKS)
    @in_turn("questions, length", [(1, 300), (1, 1500), (4, 1024)])
    def test_a_context_has_the_length_asked_for_and_not_more(
        self, task: str, questions: int, length: int, count: Callable[[str], int]
    ) -> None:
        item = make_item(task, questions, length, HAYSTACK, count, 0, 0)
        assert length - 40 <= count(item.context) <= length
        assert len(item.questions) == questions

    @in_turn("task", TASKS)
    def test_items_depend_on_seed_and_number_only(self, task: str) -> None:
        first = make_item(task, 2, 400, HAYSTACK, words, 3, 1)
        assert make_item(task, 2, 400, HAYSTACK, words, 3, 1) == first
        assert make_item(task, 2, 400, HAYSTACK, words, 3, 2).context != first.context
        assert make_item(task, 2, 400, HAYSTACK, words, 4, 1).context != first.context

    @pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
    def test_a_needle_is_where_it_was_put(self, depth: float) -> None:
        context = make_item("niah_single", 1, 900, HAYSTACK, words, 0, 0, depth).context
        _, text = context.split("\n\n", 1)
        assert text.index("The secret number") / len(text) == pytest.approx(depth, abs=0.06)

    @in_turn("task", TASKS)
    def test_distractors_have_the_form_of_the_answer_and_differ_from_it(self, task: str) -> None:
        for question in make_item(task, 4, 600, HAYSTACK, words, 0, 0).questions:
            assert len(question.distractors) == NUM_DISTRACTORS
            for distractor in question.distractors:
                assert len(set(distractor)) == len(distractor) == len(question.answers)
                assert not set(distractor) & set(question.answers)

    @pytest.mark.parametrize(("task", "needles"), [("niah_single", 3), ("niah_multikey", 12)])
    def test_needles_are_there_once_with_different_keys(self, task: str, needles: int) -> None:
        item = make_item(task, 3, 900, HAYSTACK, words, 0, 0)
        found = dict(re.findall(r"The secret number of the (\w+ \w+) is (\d{7})\.", item.context))
        assert len(found) == needles
        for number, question in enumerate(item.questions):
            (key,) = re.findall(r"the (\w+ \w+)\?", question.text)
            assert question.answers == (found[key],)
            hidden = {value for (value,) in question.distractors} & set(found.values())
            left = needles - 1 - number
            assert len(hidden) == min(left, NUM_DISTRACTORS), "needles not asked for so far come first"

    @in_turn("task", TASKS)
    def test_what_earlier_turns_said_is_no_distractor(self, task: str) -> None:
        said = set[str]()
        for question in make_item(task, 4, 900, HAYSTACK, words, 0, 0).questions:
            assert not said & {value for distractor in question.distractors for value in distractor}
            said |= set(question.answers)

    def test_variables_are_chained_in_order(self) -> None:
        item = make_item("vt", 3, 900, HAYSTACK, words, 0, 0)
        sources = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", item.context))
        assert len(sources) == 3 * (HOPS + 1)
        for question in item.questions:
            (value,) = re.findall(r"\d{5}", question.text)
            assert [sources[name] for name in question.answers] == [value, *question.answers[:-1]]
            places = [item.context.index(f"VAR {name} =") for name in question.answers]
            assert places == sorted(places)

    @pytest.mark.parametrize(("length", "common", "rare"), [(300, 2, 1), (1100, 10, 1), (4000, 30, 3)])
    def test_common_words_are_common(self, length: int, common: int, rare: int) -> None:
        item = make_item("cwe", 2, length, HAYSTACK, words, 0, 0)
        for question, text in zip(item.questions, re.findall(r"List \w: (.*)", item.context), strict=True):
            counts = Counter(re.findall(r"\d+\. (\w+)", text))
            assert {word for word, number in counts.most_common(COMMON_WORDS)} == set(question.answers)
            assert {counts[word] for word in question.answers} >= {common} or length == 300
            assert {number for word, number in counts.items() if word not in question.answers} == {rare}
            assert all(word in counts for distractor in question.distractors for word in distractor)

    def test_with_few_words_all_occur_more_often(self) -> None:
        few = Haystack(HAYSTACK.words, HAYSTACK.vocabulary[:60])
        item = make_item("cwe", 1, 3000, few, words, 0, 0)
        counts = Counter(re.findall(r"\d+\. (\w+)", item.context))
        assert len(counts) <= 60
        assert {word for word, _ in counts.most_common(COMMON_WORDS)} == set(item.questions[0].answers)

    def test_frequent_words_follow_a_power_law(self) -> None:
        item = make_item("fwe", 2, 1000, HAYSTACK, words, 0, 0)
        for question, text in zip(item.questions, re.findall(r"Text \w: (.*)", item.context), strict=True):
            counts = Counter(text.split())
            first, second, third, fourth = (number for _, number in counts.most_common(4))
            assert tuple(word for word, _ in counts.most_common(3)) == question.answers
            assert first / third == pytest.approx((4 / 2) ** 2, rel=0.1)
            assert second / fourth == pytest.approx((5 / 3) ** 2, rel=0.1)

    def test_noise_is_a_haystack(self) -> None:
        noise = Haystack.of(None, python_manual())
        item = make_item("niah_single", 1, 400, noise, words, 0, 0)
        assert item.context.count("The kettle is on.") > 10

    @pytest.mark.parametrize(("task", "questions"), [("niah_single", 4), ("vt", 4), ("cwe", 1), ("fwe", 1)])
    def test_too_short_lengths_are_refused(self, task: str, questions: int) -> None:
        with pytest.raises(ConfigError, match=r"length is 30, .* raise --lengths"):
            make_item(task, questions, 30, HAYSTACK, words, 0, 0)

    def test_texts_without_words_are_refused(self) -> None:
        with pytest.raises(DataError, match="--text has no words"):
            Haystack.of("123 456", "123 456")
        with pytest.raises(ConfigError, match="cwe needs 20 different words"):
            make_item("cwe", 1, 300, Haystack(("a",), ("some", "words")), words, 0, 0)

    def test_scores_are_shares_of_the_answers(self) -> None:
        question = Question("?", "", ("alpha", "beta"), ())
        assert [question.score(reply) for reply in ("Beta, gamma", "alpha beta", "none")] == [0.5, 1.0, 0.0]


@pytest.fixture
def item(count: Callable[[str], int]) -> Item:
    return make_item("niah_multikey", 3, 350, HAYSTACK, count, 0, 0)


class TestAnswers:
    @pytest.mark.every(2)
    @pytest.mark.parametrize(
        ("policy", "ask"), [("full", ask_in_turns), ("h2o", ask_in_turns), ("full", ask_without_context)]
    )
    def test_margins_are_those_of_one_forward_and_questions_stay(
        self, policy: str, ask: Callable[..., Iterator[Answer]], talker: Any, tokenizer: Any, item: Item
    ) -> None:
        """Without eviction: against the model's own log-probabilities of the whole conversation."""
        model, config = talker(context=2048), CacheConfig(policy, **({"window": 1024} if policy == "h2o" else {}))
        with Engine(model, tokenizer, config) as engine:
            conversation = Conversation(engine, recall="off")
            answers = list(ask(conversation, item))
            stream = list(engine.tokens)
        text = tokenizer.decode(stream)
        assert (item.context in text, READ in text) == (ask is ask_in_turns,) * 2
        assert [answer.question for answer in answers] == [0, 1, 2]
        for answer, question in zip(answers, item.questions, strict=True):
            prefix = tokenizer(question.prefix, add_special_tokens=False)["input_ids"]
            (end,) = (n for n in range(len(stream)) if stream[:n][-len(prefix) :] == prefix)
            start = stream[:end]
            scores = []
            for values in (question.answers, *question.distractors):
                own = tokenizer(f" {values[0]}", add_special_tokens=False)["input_ids"]
                tokens = torch.tensor([[*start, *own]])
                logits = model(tokens, logits_to_keep=len(own) + 1).logits[0, :-1].log_softmax(-1)
                scores.append(float(logits.gather(-1, torch.tensor(own)[:, None]).sum()))
            assert answer.margin == pytest.approx(scores[0] - max(scores[1:]), rel=LIKELIHOOD, abs=1e-3)

    def test_one_turn_has_context_and_question_in_one_message(
        self, talker: Any, tokenizer: Any, count: Callable[[str], int]
    ) -> None:
        item = make_item("vt", 1, 350, HAYSTACK, count, 0, 0)
        with Engine(talker(), tokenizer, CacheConfig("sink", 64), SamplingConfig(0.0)) as engine:
            (answer,) = ask_at_once(Conversation(engine, recall="off"), item)
            text = tokenizer.decode(list(engine.tokens))
        assert f"{item.context}\n\n{item.questions[0].text}" in text
        assert READ not in text
        assert math.isfinite(answer.margin)

    @pytest.mark.exhaustive
    def test_policies_and_the_zero_point_see_the_same_earlier_turns(
        self, talker: Any, tokenizer: Any, item: Item
    ) -> None:
        """Right answers, whatever the model replies."""
        (first, *_), streams = item.questions, dict[str, str]()
        for ask, config in (
            (ask_without_context, CacheConfig("full")),
            (ask_in_turns, CacheConfig("full")),
            (ask_in_turns, CacheConfig("sink", 64)),
            (ask_in_turns, CacheConfig("h2o", 64)),
        ):
            with Engine(talker(context=2048), tokenizer, config) as engine:
                assert len(list(ask(Conversation(engine, recall="off"), item))) == len(item.questions)
                text = tokenizer.decode(list(engine.tokens))
            streams[f"{ask.__name__} {config.policy}"] = text[text.index(first.text) :]
        (said,) = set(streams.values())
        for question in item.questions:
            assert said.count(f"{question.prefix} {question.answers[0]}") == 1
        assert len(re.findall(r"\d{7}", said)) == len(item.questions), "no reply of the model is left"


class TestRates:
    @staticmethod
    def answers(*margins: float, score: float = 1.0) -> list[dict[str, Any]]:
        """Two questions for each item."""
        return [{"item": n // 2, "question": n % 2, "score": score, "margin": m} for n, m in enumerate(margins)]

    def test_recovery_is_the_part_of_the_gain(self) -> None:
        nothing, full = self.answers(-1, -3, -2, -2), self.answers(4, 2, 3, 3)
        rated = rates(self.answers(0, 0, -1, 3, score=0.5), nothing, full)
        assert rated["accuracy"] == 0.5
        assert rated["margin"] == pytest.approx(0.5)
        assert rated["margins"] == pytest.approx([-0.5, 1.5])
        assert (rated["margin_nothing"], rated["margin_full"]) == (-2, 3)
        assert rated["recovery"] == pytest.approx(0.5)
        assert rated["recovery_interval"] == pytest.approx([0.4, 0.6])
        assert rated["to_full"]["mean"] == pytest.approx(-2.5)
        assert rated["to_full"]["low"] == pytest.approx(-3)
        assert rated["to_full"]["high"] == pytest.approx(-2)

    def test_the_ends_of_the_scale(self) -> None:
        nothing, full = self.answers(-1, -3, -2, -2), self.answers(4, 2, 3, 3)
        assert rates(full, nothing, full)["recovery"] == 1
        assert rates(full, nothing, full)["to_full"] is None
        assert rates(nothing, nothing, full)["recovery"] == 0

    def test_there_is_none_without_a_gain_of_the_full_cache(self) -> None:
        nothing, full = self.answers(-1, -1), self.answers(-2, -1)
        assert rates(full, nothing, full)["recovery"] is None
        assert rates(nothing, nothing, None)["recovery"] is None
        assert rates(nothing, nothing, None)["to_full"] is None


class TestCommand:
    @pytest.fixture
    def model(self, talker: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
        """A random model whose context has room for four questions."""
        return saved(talker(context=2048), tokenizer, tmp_path / "model")

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("no_charts")
    def test_policies_on_tasks(self, model: Path, tmp_path: Path) -> None:
        base = ["tasks", "--suite", "ruler", "-m", model, "--tasks", "vt", "--lengths", "400"]
        base += ["--items", "2", "--windows", "64", "--form", "one-turn", "--out", tmp_path / "out", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--policies", "full")
        assert done.exit_code == 0, done.stderr
        run, *found = records(done.stdout)
        assert (run["suite"], run["items"], run["lengths"]) == ("ruler", 2, [400])
        assert [(record["task"], record["policy"], record["recovery"]) for record in found] == [
            ("vt", "full", None if record["margin"] <= record["margin_nothing"] else 1) for record in found
        ]
        parts = {path.name for path in (tmp_path / "out" / "parts").iterdir()}
        assert len(parts) == 2, "with and without the context"
        done = invoke("h2o-compare", *base, "--policies", "full,sink")
        assert done.exit_code == 0, done.stderr
        _, *more = records(done.stdout)
        assert [record for record in more if record["policy"] == "full"] == found
        assert len(parts & {path.name for path in (tmp_path / "out" / "parts").iterdir()}) == 2, "results are reused"
        (sink,) = (record for record in more if record["policy"] == "sink")
        assert (sink["type"], sink["window"], len(sink["margins"])) == ("tasks", 64, 1)
        assert sink["to_full"]["low"] <= sink["margin"] - sink["margin_full"] <= sink["to_full"]["high"]
        table = (tmp_path / "out" / "tasks.md").read_text()
        assert "one-turn, 400 tokens" in table
        assert f"| sink | 64 | {sink['accuracy']:.0%} {sink['margin']:+.2f}" in table
        replies = tmp_path / "out" / "replies" / "vt-one-turn-400-sink-64.jsonl"
        assert [json.loads(line)["question"] for line in replies.read_text().splitlines()] == [0] * 2

    @pytest.mark.exhaustive
    def test_a_needle_by_length_and_depth(self, model: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        base = ["tasks", "--suite", "ruler", "-m", model, "--items", "2", "--windows", "64", "--out", out]
        base += ["--depths", "0,50", "--lengths", "150,300", "--policies", "sink,recent"]
        done = invoke("h2o-compare", *base)
        assert done.exit_code == 0, done.stderr
        run, *found = records((out / "records.jsonl").read_text())
        assert (run["forms"], run["tasks"], run["depths"]) == (["one-turn"], ["niah_single"], [0, 50])
        cells = {(record["policy"], record["length"], record["depth"]) for record in found}
        assert len(cells) == len(found) == 2 * 2 * 2
        assert (out / "needles.png").stat().st_size > 5000
        table = (out / "tasks.md").read_text()
        assert "| depth | 150 tokens | 300 tokens |" in table
        assert table.count("| 50% |") == 2
        assert invoke("h2o-compare", "report", out, "--to", tmp_path / "report.html", "-q").exit_code == 0

    @pytest.mark.parametrize(("options", "words"), [
        ("--depths 0,101", "--depths takes 0 to 100"),
        ("--depths 50 --form multi-turn", "in one turn only"),
        ("--depths 50 --tasks vt", "goes with niah_single"),
    ])  # fmt: skip
    def test_depths_are_of_a_single_needle(self, options: str, words: str) -> None:
        done = invoke("h2o-compare", "tasks", "--suite", "ruler", *options.split())
        assert done.exit_code == 2
        assert words in done.stderr

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("no_charts")
    def test_beyond_the_context_others_go_on_and_recall_asks_after_the_same_reading(
        self, tiny_folder: Path, tmp_path: Path
    ) -> None:
        base = ["tasks", "--suite", "ruler", "-m", tiny_folder, "--items", "2", "--tasks", "niah_single"]
        base += ["--form", "multi-turn", "--policies", "full,sink", "--windows", "64", "--lengths", "150,400"]
        done = invoke("h2o-compare", *base, "--recall", "off,auto", "--out", tmp_path / "out", "--jsonl", "-")
        assert done.exit_code == 0, done.stderr
        assert "policy full is left out at 400 tokens: the model has 400 positions" in done.stderr
        found = records(done.stdout)[1:]
        assert [(r["length"], r["policy"], r["recall"]) for r in found] == [
            (150, "full", "off"),
            *((length, "sink", mode) for length in (150, 400) for mode in ("off", "auto")),
        ]
        assert [r["margin_full"] is None for r in found] == [False] * 3 + [True] * 2
        assert (found[3]["recalling"], found[4]["recalling"] > 0) == (0, True)
        assert found[3]["margins"] != found[4]["margins"]
        assert len(list((tmp_path / "out" / "parts").iterdir())) == 5, "both modes are asked after one reading"
        assert "| sink with recall | 64 |" in (tmp_path / "out" / "tasks.md").read_text()

    def test_a_full_cache_ends_at_the_context(self, tiny_folder: Path) -> None:
        base = ["tasks", "--suite", "ruler", "-m", tiny_folder, "--items", "2", "--tasks", "vt", "-q"]
        done = invoke("h2o-compare", *base, "--lengths", "400", "--policies", "full")
        assert done.exit_code == 2
        assert "exceeds the 400 positions of the model" in done.stderr
        done = invoke("h2o-compare", *base, "--lengths", "395", "--policies", "full", "--form", "one-turn")
        assert done.exit_code == 1
        assert "exceed the model's 400 positions" in done.stderr
