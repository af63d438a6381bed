"""The engine's guarantees: every yielded token is in the cache, and a turn may end anywhere."""

import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Engine, H2OStreamError, SamplingConfig
from h2o_stream.config import PREFILL_STEP
from h2o_stream.engine.device_logits import TensorLogits
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.engine.sampling import Sampler
from h2o_stream.engine.text import TextStream
from tests.preloaded import run as run_forked

GREEDY = SamplingConfig(temperature=0, max_tokens=12)
Talker = Callable[..., PreTrainedModel]


def run(events: Iterable[Any]) -> tuple[list[int], Finished]:
    """Token ids of a whole reply, and the event that ends it."""
    *tokens, finished = list(events)
    assert all(isinstance(token, Token) for token in tokens)
    assert isinstance(finished, Finished)
    return [token.id for token in tokens], finished


@pytest.fixture
def engine(talker: Talker, tokenizer: PreTrainedTokenizerBase) -> Iterable[Engine]:
    with Engine(talker(), tokenizer, CacheConfig(window=400), GREEDY) as engine:
        engine.end_tokens = frozenset()
        yield engine


class TestStream:
    def test_every_token_is_in_the_cache_when_it_is_shown(self, engine: Engine) -> None:
        fed = list(range(100, 140))
        list(engine.prefill(fed))
        for event in engine.decode():
            if isinstance(event, Token):
                fed.append(event.id)
                assert engine.cache.seen_tokens == event.counts.seen == len(fed)
                assert engine.cache.kept()[0, 0].tolist() == list(range(len(fed)))

    def test_a_second_turn_continues_as_if_all_were_one_prompt(self, engine: Engine) -> None:
        list(engine.prefill(range(100, 140)))
        reply, _ = run(engine.decode())
        list(engine.prefill(range(200, 210)))
        second, _ = run(engine.decode())
        engine.reset()
        list(engine.prefill([*range(100, 140), *reply, *range(200, 210)]))
        assert run(engine.decode())[0] == second

    def test_the_end_of_turn_token_is_fed_and_not_shown(self, engine: Engine) -> None:
        list(engine.prefill(range(100, 140)))
        plain, _ = run(engine.decode())
        engine.reset()
        engine.end_tokens = frozenset({plain[4]})
        list(engine.prefill(range(100, 140)))
        tokens = list(engine.decode())
        first = plain.index(plain[4])
        assert tokens[-1] == Finished("stop")
        assert [t.id for t in tokens[:-1]] == plain[: first + 1]
        assert tokens[-2].text == ""
        assert engine.cache.seen_tokens == 40 + first + 1

    def test_replies_are_sampled_where_the_logits_are(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on a GPU: the same tokens, and no logits are read on the host."""
        replies = []
        logits = engine.served._logits  # type: ignore[attr-defined]
        for there in (False, True):
            if there:
                step = lambda token, guess: (TensorLogits(logits([token], 1)[-1]), 1)  # noqa: E731
                monkeypatch.setattr(engine.served, "step", step)
                monkeypatch.setattr(TensorLogits, "__array__", None)
            engine.set_sampling(SamplingConfig(temperature=1, seed=3, max_tokens=12), reseed=True)
            engine.reset()
            list(engine.prefill(range(100, 140)))
            replies.append(run(engine.decode())[0])
        assert replies[0] == replies[1]

    def test_memory_is_flat_and_the_window_holds(self, talker: Talker, tokenizer: PreTrainedTokenizerBase) -> None:
        sampling = SamplingConfig(temperature=0, max_tokens=60)
        with Engine(talker(context=96), tokenizer, CacheConfig(window=24), sampling) as engine:
            engine.end_tokens = frozenset()
            sizes, held = set(), set()
            for _ in range(4):
                list(engine.prefill(range(100, 190)))
                for event in engine.decode():
                    if isinstance(event, Token):
                        sizes.add(event.counts.nbytes)
                        held.add(event.counts.cached)
            assert engine.cache.seen_tokens == 4 * 150
            assert len(sizes) == 1
            assert held == {24}

    def test_prefill_reports_progress(self, engine: Engine) -> None:
        engine.prefill_step = PREFILL_STEP
        events = list(engine.prefill(range(100, 800)))
        assert [event.done for event in events] == [*range(PREFILL_STEP, 700, PREFILL_STEP), 700]
        assert {event.total for event in events} == {700}
        assert events[-1].counts.cached == 400

    def test_nothing_to_continue_or_to_feed(self, engine: Engine) -> None:
        with pytest.raises(H2OStreamError, match="prefill a prompt first"):
            list(engine.decode())
        with pytest.raises(H2OStreamError, match="no tokens"):
            list(engine.prefill([]))


class TestEnds:
    def test_length(self, engine: Engine) -> None:
        list(engine.prefill([100]))
        tokens, finished = run(engine.decode())
        assert (len(tokens), finished.reason) == (12, "length")

    def test_interrupted_between_tokens(self, engine: Engine) -> None:
        list(engine.prefill(range(100, 140)))
        plain, _ = run(engine.decode())
        engine.reset()
        list(engine.prefill(range(100, 140)))
        replies = engine.decode()
        begun = [event.id for event in islice(replies, 5)]
        engine.should_stop = lambda: True
        assert list(replies) == [Finished("interrupted")]
        engine.should_stop = lambda: False
        engine.sampler = Sampler(GREEDY, None)
        rest, _ = run(engine.decode())
        assert [*begun, *rest][:12] == plain, "it continues exactly where it stopped"

    def test_interrupted_during_prefill(self, engine: Engine) -> None:
        engine.prefill_step = PREFILL_STEP
        progress = engine.prefill(range(100, 800))
        assert isinstance(next(progress), PrefillProgress)
        engine.should_stop = lambda: True
        assert list(progress) == [Finished("interrupted")]
        assert engine.cache.seen_tokens == PREFILL_STEP
        engine.should_stop = lambda: False
        assert len(run(engine.decode())[0]) == 12

    @pytest.mark.parametrize(("policy", "positions"), [("full", None), ("h2o", "absolute")])
    def test_context(self, talker: Talker, tokenizer: PreTrainedTokenizerBase, policy: str, positions: Any) -> None:
        config = CacheConfig(policy, 24, positions=positions)
        with Engine(talker(context=64), tokenizer, config, GREEDY, at_context="stop") as engine:
            engine.end_tokens = frozenset()
            list(engine.prefill(range(100, 160)))
            tokens, finished = run(engine.decode())
            assert (len(tokens), finished.reason) == (4, "context")
            assert "--policy h2o" in finished.detail
            assert [event.reason for event in engine.prefill([100])] == ["context"]
            assert engine.cache.seen_tokens == 64, "a refused prompt is not fed in part"

    def test_beyond_the_context_is_reported(self, talker: Talker, tokenizer: PreTrainedTokenizerBase) -> None:
        with Engine(talker(context=64), tokenizer, CacheConfig("full"), GREEDY) as engine:
            engine.end_tokens = frozenset()
            list(engine.prefill(range(100, 160)))
            assert not engine.beyond_context
            assert run(engine.decode())[1].reason == "length"
            assert engine.beyond_context

    @pytest.mark.parametrize("error", [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ])  # fmt: skip
    def test_out_of_memory(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        list(engine.prefill(range(100, 140)))

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(engine.model.forward, "stepper", None)
            patch.setattr(engine.model.model.layers[1].mlp, "forward", fail)
            finished = list(engine.decode())[-1]
        assert finished.reason == "oom"
        assert "after 4" in finished.detail
        with pytest.raises(H2OStreamError, match="cut off halfway"):
            list(engine.prefill([100]))
        engine.reset()
        assert list(engine.prefill([100]))

    @pytest.mark.exhaustive
    @pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
    def test_real_out_of_memory(self) -> None:
        done = run_forked("-c", Path(__file__).with_name("run_out_of_memory.py").read_text())
        assert done.stdout.startswith("oom out of memory after"), done.stderr

    def test_other_errors_are_not_reported_as_out_of_memory(self, engine: Engine, monkeypatch: Any) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("shapes do not match")

        monkeypatch.setattr(engine.model.model.layers[0].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="shapes"):
            list(engine.prefill([100]))


class TestText:
    @pytest.mark.parametrize(
        "text", ["plain words, and more", "naïve café", "emoji 👩‍👩‍👧 and 日本語 🇫🇷", "tabs\tand\nlines", ""]
    )
    def test_pieces_make_the_text_and_never_half_a_character(self, tokenizer: Any, text: str) -> None:
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in tokenizer(text)["input_ids"]]
        assert "".join(pieces) + stream.flush() == text
        assert not any("\ufffd" in piece for piece in pieces)

    def test_special_tokens_are_not_text(self, tokenizer: PreTrainedTokenizerBase) -> None:
        stream = TextStream(tokenizer)
        assert "".join(stream.push(token) for token in tokenizer("one<|im_end|>two")["input_ids"]) == "onetwo"

    @pytest.mark.parametrize(("text", "stops", "shown"), [
        ("Sure.\nUser: and", ["\nUser:"], "Sure."), ("Sure.\nUse it", ["\nUser:"], "Sure.\nUse it"),
        ("one two three", ["three", "two"], "one "), ("aaab", ["aab"], "a"),
        ("ends with \nUs", ["\nUser:"], "ends with \nUs"),
    ])  # fmt: skip
    def test_stop_strings(self, tokenizer: PreTrainedTokenizerBase, text: str, stops: list[str], shown: str) -> None:
        stream, out = TextStream(tokenizer, stops), ""
        for token in tokenizer(text)["input_ids"]:
            out += stream.push(token)
            assert shown.startswith(out), "nothing of a stop string is ever shown"
            if stream.stopped:
                break
        assert out + stream.flush() == shown
        assert stream.stopped == (shown != text)
