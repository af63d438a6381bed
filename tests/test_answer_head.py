"""Recall in other words: the answer head, what is kept of passages, and when a question is compared with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from h2o_stream import CacheConfig, Conversation, Engine
from h2o_stream.attachment.describe import describe
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.recall import answer_head
from h2o_stream.recall.answer_head import AnswerHead, Floats, Text, find_head
from h2o_stream.recall.index import PassageIndex
from h2o_stream.recall.passage import Passage
from h2o_stream.runtime import first_layers
from h2o_stream.runtime.measured import read_answer_head
from tests.fixtures import make_llama
from tests.native_builds import needs_library

FACTS = ("My neighbour Mr. Okafor plays the cello.", "I am allergic to peanuts.", "What is the weather like?")


@needs_library
@torch.no_grad()
def test_projections_are_those_of_the_model() -> None:
    model, tokens = make_llama(), [3, 1, 4, 1, 5, 9, 2, 6]
    description, rotary, seen = describe(model), model.model.rotary_emb, list[list[torch.Tensor]]()
    for layer in model.model.layers[:2]:
        outputs = list[torch.Tensor]()
        seen.append(outputs)
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[-1]))
    model(torch.tensor([tokens]))
    projected = first_layers.FirstLayers(description, 2).project(tokens)
    for (query, key), (queries, keys) in zip(seen, projected, strict=True):
        count, _, size = queries.shape
        query, key = (x.view(1, count, -1, size).transpose(1, 2) for x in (query, key))
        cosine, sine = rotary(query, torch.full((1, count), first_layers.DISTANCE))
        rotated, _ = apply_rotary_pos_emb(query, key, cosine, sine)
        expected = rotated[0].transpose(0, 1) / size**0.5
        torch.testing.assert_close(torch.from_numpy(queries), expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(torch.from_numpy(keys), key[0].transpose(0, 1), atol=1e-5, rtol=1e-4)


@needs_library
def test_large_models_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    description = describe(make_llama())
    assert first_layers.first_layers(description, 1)
    monkeypatch.setattr(first_layers, "MAX_BYTES", description.nbytes - 1)
    assert first_layers.first_layers(description, 1) is None


class Projector:
    """In one head of a layer, the queries of each question of our pairs are the keys of its statement."""

    def __init__(self, layer: int, head: int, noise: float = 0.0) -> None:
        pairs = [json.loads(line) for line in answer_head._PAIRS.read_text(encoding="utf-8").splitlines()]
        self.layer, self.head, self.noise = layer, head, noise
        self.numbers = {text: number for number, pair in enumerate(pairs) for text in pair.values()}
        self.texts = [*self.numbers, *answer_head._NEUTRAL]
        self.count = len(pairs)

    def place(self, text: str) -> Text:
        return Text([0, self.texts.index(text), 1], 1, 2)

    def __call__(self, tokens: list[int]) -> list[tuple[Floats, Floats]]:
        noise = numpy.random.default_rng(tokens[1])
        meanings = numpy.eye(self.count + 1, self.count, dtype=numpy.float32)
        meaning = meanings[self.numbers.get(self.texts[tokens[1]], self.count)]
        layers = []
        for layer in range(3):
            queries, keys = (noise.normal(size=(3, heads, self.count)).astype(numpy.float32) for heads in (4, 2))
            if layer == self.layer:
                queries[:, self.head] = meaning + self.noise * queries[:, self.head]
                keys[:, self.head // 2] = meaning
            layers.append((queries, keys))
        return layers


def test_the_head_that_matches_our_pairs_is_found() -> None:
    projector = Projector(layer=2, head=3)
    head = find_head(projector, projector.place)
    assert head is not None
    assert (head.layer, head.query_head) == (2, 3)
    assert 0.5 < head.min_score <= 1


def test_a_model_may_have_no_such_head() -> None:
    projector = Projector(layer=1, head=0, noise=30.0)
    assert find_head(projector, projector.place) is None


@pytest.mark.parametrize("kept", [True, False])
def test_keys_are_kept_with_their_passages(kept: bool, tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite" if kept else None
    index = PassageIndex(path)
    for turn, text in enumerate(FACTS, 1):
        index.add(turn, text, "Fine.", [Passage(turn, "user", text, turn, turn + 1)])
    assert [text for _, text in index.without_keys("head", 2)] == [*reversed(FACTS[1:])]
    for number, text in index.without_keys("head", 9):
        index.add_keys("head", number, None if text.endswith("?") else numpy.full((2, 4), number), number / 2)
    assert index.without_keys("head", 9) == []
    assert len(index.without_keys("another", 9)) == 3
    if kept:
        index.close()
        index = PassageIndex(path)
    found = [(number, keys.tolist(), baseline) for number, keys, baseline in index.with_keys("head", 4, 9)]
    assert found == [(number, [[number] * 4] * 2, number / 2) for number in (2, 1)]
    index.truncate(1)
    assert [number for number, _, _ in index.with_keys("head", 4, 9)] == [1]
    index.close()


@pytest.fixture(scope="module")
def conversation(served_embedded: LoadedModel) -> Conversation:
    engine = Engine(served_embedded.model, served_embedded.tokenizer, CacheConfig(window=64))
    conversation = Conversation(engine, recall="wide")
    for fact in FACTS:
        list(conversation.feed_turn(fact, "Thank you, I will remember that."))
    list(conversation.feed_turn("Here is some news: " + "The market was calm today. " * 40, "Interesting."))
    return conversation


@needs_library
class TestEmbedded:
    """The embedded model, which has such a head."""

    def recalled(self, conversation: Conversation, message: str) -> Sequence[str]:
        return [item.excerpt for item in conversation.recall.find(message).candidates]

    def test_a_question_in_other_words_finds_its_answer(self, conversation: Conversation) -> None:
        assert self.recalled(conversation, "Which food must I avoid?") == [FACTS[1]]
        conversation.recall.mode = "auto"
        assert self.recalled(conversation, "Which food must I avoid?") == []
        conversation.recall.mode = "wide"

    def test_only_questions_about_the_user_are_compared(self, conversation: Conversation) -> None:
        assert self.recalled(conversation, "Write a poem about food.") == []
        assert self.recalled(conversation, "Which food is healthy?") == []

    def test_the_head_that_ships_is_known(self, conversation: Conversation) -> None:
        head = AnswerHead(*read_answer_head(conversation.engine.cache.model_digest()))  # type: ignore[union-attr]
        assert (head.layer, head.query_head) == (15, 6)
