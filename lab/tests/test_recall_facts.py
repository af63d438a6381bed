"""Facts that are fed and asked for: distances, answers and their rates."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from h2o_lab.recall.asking import ask, tell
from h2o_lab.recall.comparison import rates_by_distance
from h2o_lab.recall.fact_stream import FactStream, Filler, facts_told_once, facts_with_updates
from h2o_lab.recall.facts import never_said, question_after_update, questions_about, read_facts, tells
from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import ConfigError
from h2o_stream.loading.transformers_model import LoadedModel
from h2o_stream.session.conversation import Conversation
from tests.commands import invoke, records
from tests.states import equal_states


class TestFacts:
    def test_every_value_is_told_by_its_sentence_only(self) -> None:
        facts = read_facts(30)
        assert len({fact.id for fact in facts}) == 30
        for fact in facts:
            assert tells(fact.statement, fact.answers)
            assert tells(fact.update, fact.updated)
            assert tells(f"{fact.reply} {fact.answers[0]}.", fact.answers)
            for other in facts:
                texts = [other.same, other.other, other.reply, "" if other is fact else other.statement]
                assert not any(tells(text, (*fact.answers, *fact.updated)) for text in texts), (fact.id, other.id)
        for question in never_said(facts):
            assert not tells(question.text, question.wrong)
        assert len(never_said(facts)) == 15

    def test_more_than_there_are(self) -> None:
        with pytest.raises(ConfigError, match="lower --facts"):
            read_facts(31)

    @pytest.mark.parametrize(("reply", "has_value"), [
        ("It is 407.", True), ("in room 407, I think", True), ("IT IS ROOM 407B", False), ("4070", False),
        ("1,407 rooms", False), ("407.5", False), ("Your hotel is the casa amarela!", True), ("Casa Amarelas", False),
        ("", False),
    ])  # fmt: skip
    def test_values_are_whole_words(self, reply: str, has_value: bool) -> None:
        assert tells(reply, ("407", "Casa Amarela")) == has_value

    def test_an_older_value_is_wrong_and_so_is_a_fact_in_place_of_nothing(self) -> None:
        facts = read_facts(2)
        updated = question_after_update(facts[0])
        assert updated.right("She lives in Malmo now.")
        assert not updated.right("She lives in Tartu.")
        assert not updated.right("She moved from Tartu to Malmö.")
        (never,) = never_said(facts)
        assert never.right("I do not know.")
        assert not never.right("He is called pomelo.")


class TestFactStream:
    @staticmethod
    def stream(
        talker: Any, tokenizer: Any, script: Any, distances: tuple[int, ...] = (8, 64), limit: int | None = None
    ) -> tuple[list[Any], Conversation]:
        text = tokenizer("A story about nothing in particular, which has no end. " * 3)["input_ids"]
        engine = Engine(talker(context=4096), tokenizer, CacheConfig(window=64), SamplingConfig(0.0, max_tokens=2))
        conversation = Conversation(engine, recall="off")
        stream = FactStream(conversation, script, distances, Filler(tokenizer, text), limit)
        return [event for event in stream.run() if not isinstance(event, int)], conversation

    def test_distances_are_true_and_questions_leave_no_trace(self, talker: Any, tokenizer: Any) -> None:
        facts = read_facts(2)
        answers, conversation = self.stream(talker, tokenizer, facts_told_once(facts))
        asked = Counter((distance, answer.kind) for distance, answer in answers)
        assert asked == {(d, kind): n for d in (8, 64) for kind, n in (("same", 2), ("other", 2), ("never", 1))}
        for distance, answer in answers:
            assert distance <= answer.tokens <= (distance + 4 if distance > 8 else 45)
            assert (answer.margin is None) == (answer.kind == "never")
        text = tokenizer.decode(list(conversation.engine.tokens))
        assert text.count("Thank you") == 2
        assert not any(fact.same in text or fact.other in text for fact in facts)
        places = [text.index(fact.statement) for fact in facts]
        assert places == sorted(places)
        conversation.engine.close()

    def test_an_update_is_told_after_the_next_facts_and_asked_for(self, talker: Any, tokenizer: Any) -> None:
        facts = read_facts(3)
        answers, conversation = self.stream(talker, tokenizer, facts_with_updates(facts))
        assert Counter((distance, answer.kind) for distance, answer in answers) == {
            (distance, "contradicted"): 3 for distance in (8, 64)
        }
        text = tokenizer.decode(list(conversation.engine.tokens))
        assert text.index(facts[1].statement) < text.index(facts[0].update) < text.index(facts[1].update)
        conversation.engine.close()

    def test_beyond_the_limit_nothing_is_asked(self, talker: Any, tokenizer: Any) -> None:
        answers, conversation = self.stream(talker, tokenizer, facts_told_once(read_facts(3)), (64, 256), 420)
        asked = {(distance, answer.id) for distance, answer in answers}
        assert asked == {(64, "sister"), (256, "sister"), (64, "teddy")}
        assert len(conversation.engine.tokens) <= 420
        conversation.engine.close()

    def test_an_answer_is_the_same_when_asked_for_again(self, talker: Any, tokenizer: Any) -> None:
        engine = Engine(talker(), tokenizer, CacheConfig("sink", 64), SamplingConfig(0.0, max_tokens=8))
        with engine:
            conversation = Conversation(engine, recall="off")
            fact = read_facts(1)[0]
            tell(conversation, fact.statement, "Thank you.")
            before = conversation.state_dict()
            same, other = questions_about(fact)
            answers = list(ask(conversation, [(same, 5), (other, 5), (same, 5)]))
            assert answers[0] == answers[2] != answers[1]
            after = conversation.state_dict()
            assert equal_states(before, after)

    @pytest.mark.exhaustive
    def test_the_embedded_model_tells_what_it_holds(self, embedded: LoadedModel) -> None:
        fact, sampling = read_facts(2)[1], SamplingConfig(temperature=0.0, max_tokens=12)
        with Engine(embedded.model, embedded.tokenizer, CacheConfig("full"), sampling) as engine:
            conversation = Conversation(engine, recall="off")
            tell(conversation, "Hello!", "Hello! How can I help you today?")
            tell(conversation, fact.statement, "Thank you, I will remember that.")
            (answer,) = ask(conversation, [(questions_about(fact)[0], 0)])
        assert answer.right, answer.reply
        assert answer.margin > 0


class TestRates:
    @staticmethod
    def answer(kind: str, distance: int, id: str, right: bool, margin: float | None = None) -> dict[str, Any]:
        result = {"wrong": False, "recalling": right, "tokens": distance + 1}
        return {"kind": kind, "distance": distance, "id": id, "right": right, "margin": margin, **result}

    def test_shares_of_the_shortest_distance_and_of_the_same_words(self) -> None:
        same = [self.answer("same", 64, id, right, 1.0) for id, right in (("a", True), ("b", True), ("c", False))]
        far = [self.answer("same", 1024, "a", True, -1.0), self.answer("same", 1024, "c", True, 2.0)]
        other = [self.answer("other", 64, "a", True, 0.0), self.answer("other", 64, "b", False, 0.0)]
        rates = {
            (rate["kind"], rate["distance"]): rate for rate in rates_by_distance([*same, *far, *other], (64, 1024))
        }
        assert list(rates) == [("same", 64), ("same", 1024), ("other", 64)]
        assert rates["same", 64]["accuracy"] == pytest.approx(2 / 3)
        assert rates["same", 64]["relative"] == 1
        assert rates["same", 1024]["relative"] == 2, "of a and c only a was fed nearby"
        assert rates["same", 1024]["margin"] == rates["same", 1024]["recalled"] == 0.5
        assert rates["same", 1024]["tokens"] == 1025
        assert rates["other", 64]["of_same"] == 0.5
        assert rates["other", 64]["recalling"] == 0.5

    def test_nothing_told_gives_no_share(self) -> None:
        (rate,) = rates_by_distance([self.answer("same", 64, "a", False, 1.0)], (64,))
        assert rate["relative"] is None
        assert rate["of_same"] is None


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_charts")
def test_recall_on_the_command_line(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = ["recall", "-m", tiny_folder, "--text", text, "--facts", "2", "--distances", "8,60", "--jsonl", "-"]
    base += ["--chat", "150", "--policies", "full,sink", "--windows", "64", "--out", out]
    done = invoke("h2o-compare", *base)
    assert done.exit_code == 0, done.stderr
    run, *results = records(done.stdout)
    assert (run["facts"], run["recall"], run["chat"]) == (2, ["off"], 150)
    headline = [r for r in results if r["type"] == "recall" and r["kind"] == "same"]
    assert [(r["policy"], r["window"], r["distance"]) for r in headline] == [
        ("full", None, 8), ("full", None, 60), ("sink", 64, 8), ("sink", 64, 60),
    ]  # fmt: skip
    kinds = [r["kind"] for r in results if r["type"] == "recall" and r["policy"] == "sink"]
    assert kinds == ["same", "same", "other", "other", "contradicted", "contradicted", "never", "never"]
    for result in results:
        assert result["recall"] == "off"
        assert result["recalling"] == 0
        assert 0 <= result["wrong"] <= 1 - result["accuracy"]
        assert (result["margin"] is None) == (result["kind"] == "never")
        assert result["questions"] == {"never": 1}.get(result["kind"], 2) or result["policy"] == "full"
    chat = [r for r in results if r["type"] == "recall-chat"]
    assert [(r["policy"], r["kind"]) for r in chat] == [("sink", "same"), ("sink", "other"), ("sink", "never")]
    assert all(r["turns"] >= 1 and r["turns_recalling"] == 0 for r in chat)
    assert len(list((out / "parts").iterdir())) == 3
    assert "| full | - | off |" in (out / "recall.md").read_text()
    assert len(records((out / "replies" / "sink-64.jsonl").read_text())) == 14
    again = invoke("h2o-compare", *base, "-q")
    assert records(again.stdout)[1:] == results


def test_wrong_uses_of_recall(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" \n ")
    base = ["recall", "-m", tiny_folder, "--text", text]
    assert "there are no words in it" in invoke("h2o-compare", *base).stderr
    assert "--distances is empty" in invoke("h2o-compare", *base, "--distances=").stderr
    assert "lower --facts" in invoke("h2o-compare", *base, "--facts", "31").stderr
    assert "--recall takes some of auto, wide, off" in invoke("h2o-compare", *base, "--recall", "auto,on").stderr
