"""Conversations: only new tokens are fed, the system prompt once, with any template; saved ones go on the same."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import (
    CacheConfig,
    ConfigError,
    Conversation,
    Engine,
    H2OStreamError,
    SamplingConfig,
    UnsupportedModelError,
)
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.loading.transformers_model import LoadedModel
from h2o_stream.models.templates import FALLBACK_TEMPLATE
from h2o_stream.session.questions import load_questions
from h2o_stream.session.report import RunReport
from h2o_stream.session.template import ChatTemplate
from h2o_stream.session.turn import Timings, Turn
from tests.states import equal_states

END = "<|im_end|>"
SYSTEM = "You are a terse assistant."
TALK = ["What is the name of the capital of France?", "And of Italy?", "Thanks, bye!"]
REPLIES = ["Paris.", "Rome.", "You are welcome."]


class TestTemplate:
    def test_a_template_that_rewrites_the_past(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Some templates shorten old replies (such as their reasoning), so the start of a growing history changes."""
        forgetful = copy.copy(tokenizer)
        forgetful.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' and not loop.last %}(cut){{ m.content[-4:] }}{% endif %}"
            "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        with pytest.raises(UnsupportedModelError, match="past replies"):
            ChatTemplate(forgetful, None, ()).next_turn("x", False)
        forgetful.chat_template = forgetful.chat_template.replace("{{ m.content[-4:] }}", "{{ m.content }}")
        fed = ChatTemplate(forgetful, None, ()).next_turn("Next?", False).tokens
        assert tokenizer.decode(fed) == f"{END}\n<|im_start|>user\nNext?{END}\n<|im_start|>assistant\n"

    def test_a_template_without_a_system_role(self, tokenizer: PreTrainedTokenizerBase) -> None:
        strict = copy.copy(tokenizer)
        strict.chat_template = (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        prompt = ChatTemplate(strict, SYSTEM, ()).first_turn("Hello")
        assert tokenizer.decode(prompt.tokens) == f"[user] {SYSTEM}\n\nHello\n[assistant]"
        assert SYSTEM in tokenizer.decode(prompt.tokens[: prompt.num_pinned])

    def test_the_fallback_for_base_models(self, tokenizer: PreTrainedTokenizerBase) -> None:
        base = copy.deepcopy(tokenizer)
        base.chat_template, base.bos_token = FALLBACK_TEMPLATE, "<|endoftext|>"
        template = ChatTemplate(base, SYSTEM, ())
        assert tokenizer.decode(template.first_turn("Hi").tokens) == f"<|endoftext|>{SYSTEM}\n\nUser: Hi\nAssistant:"
        assert tokenizer.decode(template.next_turn("Bye", False).tokens) == "\nUser: Bye\nAssistant:"


class TestConversation:
    def talk(self, model: Any, tokenizer: Any, window: int = 256, system: str | None = SYSTEM) -> Any:
        sampling = SamplingConfig(temperature=0, max_tokens=24)
        engine = Engine(model, tokenizer, CacheConfig(window=window), sampling)
        return engine, Conversation(engine, system)

    def test_three_turns_feed_the_system_prompt_once_and_every_token(self, served_embedded: LoadedModel) -> None:
        engine, conversation = self.talk(served_embedded.model, served_embedded.tokenizer)
        fed: list[int] = []
        feed = engine.forward
        engine.forward = lambda tokens, *step: (fed.extend(tokens), feed(tokens, *step))[1]
        with engine:
            turns = [self.last(conversation.say(text)) for text in TALK]
        text = served_embedded.tokenizer.decode(fed)
        assert text.count(SYSTEM) == 1
        assert text.startswith(f"<|im_start|>system\n{SYSTEM}{END}\n")
        assert [text.count(said) for said in TALK] == [1, 1, 1]
        assert text.count("<|im_start|>assistant\n") == 3
        for number, turn in enumerate(turns, 1):
            assert turn.number == number
            assert turn.text in text
            assert f"{turn.text}{END}" in text or turn.finish == "length"
        assert turns[-1].counts.seen == len(fed) == sum(t.timings.prompt_tokens + t.timings.new_tokens for t in turns)
        assert "Paris" in turns[0].text
        assert "Rome" in turns[1].text, "it remembers what the second question is about"

    def test_the_system_prompt_survives_a_small_window(self, talker: Any, tokenizer: Any) -> None:
        engine, conversation = self.talk(talker(), tokenizer, window=48)
        with engine:
            for text in TALK:
                turn = self.last(conversation.say(text))
            pinned = len(engine.cache.pins[0])
            kept = engine.cache.kept(1)
            assert turn.counts.evicted > 0
            for head in kept[0]:
                assert head[head >= 0][:pinned].tolist() == list(range(pinned))

    @pytest.mark.exhaustive
    @pytest.mark.parametrize(("window", "seen"), [(128, 640), pytest.param(256, 3000, marks=pytest.mark.exhaustive)])
    def test_facts_of_the_system_prompt_are_known_windows_later(
        self, served_embedded: LoadedModel, window: int, seen: int
    ) -> None:
        """Keeping the prompt is not enough: behind the gap of evicted tokens, it gets no attention."""
        system = "You are a support agent of the company Bluefin. The company was founded in 1987."
        config, sampling = CacheConfig(window=window), SamplingConfig(0, max_tokens=16)
        with Engine(served_embedded.model, served_embedded.tokenizer, config, sampling) as e:
            conversation = Conversation(e, system, served_embedded.stops)
            questions = (text for _, text in load_questions(None).prompts(loop=True))
            while e.counts.seen < seen:
                list(conversation.feed_turn(next(questions), next(questions)))
            assert "1987" in self.last(conversation.say("When was the company founded?")).text

    def test_a_system_prompt_that_fills_the_context_is_refused_at_once(self, talker: Any, tokenizer: Any) -> None:
        with (
            Engine(talker(), tokenizer, CacheConfig(window=64)) as engine,
            pytest.raises(ConfigError, match="pinned tokens .* leave 0 of a window of .* positions"),
        ):
            Conversation(engine, "Be brief. " * 4000)

    def test_an_interrupted_reply_is_closed_by_the_next_turn(self, talker: Any, tokenizer: Any) -> None:
        engine, conversation = self.talk(talker(), tokenizer)
        with engine:
            events = conversation.say("Write a story about a dragon.")
            for event in events:
                if isinstance(event, Token) and event.counts.seen > 40:
                    engine.should_stop = lambda: True
                last = event
            assert (last.finish, bool(last.text)) == ("interrupted", True)
            engine.should_stop = lambda: False
            fed: list[int] = []
            feed = engine.forward
            engine.forward = lambda tokens, *step: (fed.extend(tokens), feed(tokens, *step))[1]
            assert self.last(conversation.say(TALK[0])).finish in ("stop", "length")
        assert tokenizer.decode(fed).startswith(f"{END}\n<|im_start|>user\n{TALK[0]}")

    def test_interrupted_during_the_system_prompt_it_starts_over(self, talker: Any, tokenizer: Any) -> None:
        sampling = SamplingConfig(temperature=0, max_tokens=3)
        with Engine(talker(), tokenizer, CacheConfig(window=64), sampling, should_stop=lambda: True) as engine:
            conversation = Conversation(engine, SYSTEM)
            assert self.last(conversation.say("Hi")).finish == "interrupted"
            assert engine.cache.seen_tokens == 0
            engine.should_stop = lambda: False
            first = next(conversation.say("Hi"))
            assert isinstance(first, PrefillProgress)
            assert first.counts.pinned > 0

    def test_interrupted_in_a_long_first_prompt_it_continues_from_there(self, talker: Any, tokenizer: Any) -> None:
        sampling = SamplingConfig(temperature=0, max_tokens=3)
        with Engine(talker(), tokenizer, CacheConfig(window=64), sampling) as engine:
            conversation = Conversation(engine, SYSTEM)
            events = conversation.say("word " * 700)
            next(events)
            engine.should_stop = lambda: True
            assert self.last(events).finish == "interrupted"
            seen = engine.cache.seen_tokens
            engine.should_stop = lambda: False
            turn = self.last(conversation.say("Hi"))
            assert turn.counts.seen == seen + turn.timings.prompt_tokens + turn.timings.new_tokens

    @staticmethod
    def last(events: Any) -> Turn:
        *_, turn = events
        return turn


class TestReport:
    def test_speed_by_length_adds_up(self, talker: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        report = RunReport()
        sampling = SamplingConfig(temperature=0, max_tokens=7)
        with Engine(talker(), tokenizer, CacheConfig(window=64), sampling) as engine:
            engine.end_tokens = frozenset()
            conversation = Conversation(engine)
            turns = []
            for _ in range(3):
                for event in conversation.say("word " * 700):
                    report.add_event(event)
                turns.append(event)
        record = report.record()
        assert record["turns"] == 3
        assert record["finish"] == {"length": 3}
        assert record["seen_tokens"] == turns[-1].counts.seen
        assert report.total.prompt_tokens == sum(turn.timings.prompt_tokens for turn in turns)
        assert report.total.new_tokens == 21
        assert report.total.prefill_s == pytest.approx(sum(turn.timings.prefill_s for turn in turns))
        assert report.total.decode_s == pytest.approx(sum(turn.timings.decode_s for turn in turns))
        assert [start for start, _, _ in report.by_length()] == [0, 1000, 2000]

    def test_a_long_run_fits_the_table(self) -> None:
        report = RunReport()
        report._by_thousand = {thousand: Timings(new_tokens=1, decode_s=0.5) for thousand in range(1000)}
        rows = report.by_length()
        assert len(rows) <= 12
        assert sum(work.new_tokens for _, _, work in rows) == 1000
        assert rows[0][0] == 0
        assert rows[-1][1] >= 1_000_000


SEA = ["Tell me about the sea.", "And the tower?", "What about the light?", "Thanks, go on."]
Talker = Callable[..., PreTrainedModel]


def sampling_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str = "h2o") -> Engine:
    return Engine(model, tokenizer, CacheConfig(policy, 64), SamplingConfig(temperature=1.0, seed=3, max_tokens=10))


def said_of(conversation: Conversation, text: str) -> str:
    return next(event.text for event in conversation.say(text) if isinstance(event, Turn))


def test_a_state_that_does_not_fit_changes_nothing(talker: Talker, tokenizer: PreTrainedTokenizerBase) -> None:
    model = talker()
    with sampling_engine(model, tokenizer, "sink") as one:
        talk = Conversation(one)
        said_of(talk, SEA[0])
        foreign = talk.state_dict()
    with sampling_engine(model, tokenizer) as other:
        again = Conversation(other)
        said_of(again, SEA[1])
        before = again.state_dict()
        with pytest.raises(H2OStreamError, match="another policy"):
            again.load_state_dict(foreign)
        with pytest.raises(H2OStreamError, match="damaged"):
            again.load_state_dict({name: tensor for name, tensor in before.items() if name != "conversation"})
        after = again.state_dict()
        assert equal_states(before, after)


def test_another_system_prompt(talker: Talker, tokenizer: PreTrainedTokenizerBase) -> None:
    with sampling_engine(talker(), tokenizer) as one:
        talk = Conversation(one, "Be brief.")
        said_of(talk, SEA[0])
        before = talk.state_dict()
        with pytest.raises(ConfigError, match="pinned tokens"):
            talk.reset("word " * 8000)
        after = talk.state_dict()
        assert equal_states(before, after)
        talk.reset("Be kind.")
        said_of(talk, SEA[1])
        start = tokenizer.decode(list(one.tokens[: one.counts.pinned + one.counts.sinks]))
        assert "Be kind." in start
        assert "Be brief." not in tokenizer.decode(list(one.tokens))
