"""What is sent: errors in a stream, what a stop string cuts off, the items of events, bytes of tokens."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.serve.logprobs import TokenTexts
from h2o_stream.serve.messages import Dialogue
from h2o_stream.serve.replies import Done, Piece, Seen, Started
from h2o_stream.serve.requests import Options, Sampled
from h2o_stream.serve.response_events import stream_response
from h2o_stream.serve.responses import AskedResponse
from h2o_stream.serve.stream import LogprobSampler
from h2o_stream.session.other_calls import Call
from tests import test_serve_protocol
from tests.native_builds import needs_library
from tests.protocol import ADAPTERS, answered
from tests.served import Running
from tests.test_serve_protocol import BASE, FIELDS

pytestmark = needs_library

server = test_serve_protocol.server


@pytest.mark.parametrize("endpoint", FIELDS)
def test_an_error_in_a_stream(server: Running, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients raise it: the answer that has begun is not taken for a whole one."""
    sample, count = LogprobSampler.sample, iter(range(3))

    def fails(self: LogprobSampler, *given: Any) -> int:
        if next(count, None) is None:
            raise ZeroDivisionError
        return sample(self, *given)

    client = server.client()
    create = {"chat/completions": client.chat.completions, "completions": client.completions}.get(
        endpoint, client.responses
    )
    with monkeypatch.context() as patched:
        patched.setattr(LogprobSampler, "sample", fails)
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(create.create(model="h2o", stream=True, **BASE[endpoint]))
    count = iter(range(3))
    with monkeypatch.context() as patched:
        patched.setattr(LogprobSampler, "sample", fails)
        if endpoint == "responses":
            _, events = answered(server, endpoint, BASE[endpoint] | {"stream": True})
            assert (events[-1]["type"], events[-1]["code"]) == ("error", None)


def test_what_a_stop_string_cuts_off_is_forgotten(server: Running) -> None:
    """The next turn goes on from what the client has seen, and from nothing else."""
    said = server.say("Tell me.", max_tokens=30, store=False)["choices"][0]["message"]["content"]
    history = ["Tell me."]
    for _ in range(2):
        stop = said[len(said) // 2 :][:4]
        answer = server.say(*history, max_tokens=30, stop=[stop])
        text = answer["choices"][0]["message"]["content"]
        assert text == said[: said.find(stop)]
        assert answer["usage"]["completion_tokens"] > 1
        live = server.service.conversations.awake[answer["h2o"]["conversation"]]
        tokenizer, tokens = live.engine.tokenizer, [*live.engine.tokens]
        assert tokenizer.decode(tokens).endswith(f"{text}<|im_end|>")
        assert len(tokens) == answer["h2o"]["seen_tokens"]
        history += [text, "And then?"]
        fresh = server.say(*history, max_tokens=30, store=False, recall="auto")  # another key: read as a whole
        assert fresh["h2o"]["origin"] == "read"
        again = server.say(*history, max_tokens=30, store=False)
        assert again["h2o"]["origin"] == "branched"
        said = again["choices"][0]["message"]["content"]
        assert said == fresh["choices"][0]["message"]["content"]


@given(
    st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=4), st.sampled_from(["stop", "length"]),
    st.lists(st.sampled_from(["weather", "time"]), max_size=2),
)  # fmt: skip
def test_the_items_of_events_are_those_of_the_response(pieces: Any, finish: str, names: list[str]) -> None:
    """Thinking, text and calls, in their order and at their places."""
    options, sampled = Options(CacheConfig(window=64)), Sampled(SamplingConfig(), stream=True)
    asked = AskedResponse(Dialogue(None, (), "Hi."), options, sampled, None, False, {})
    thinking = "".join(thought for thought, _ in pieces)
    text = "".join(said for _, said in pieces)
    seen = Seen(0, 3, len(pieces), len(thinking), CacheCounts(3, 3, 0, 0, 0, 3, 64, 1))
    calls = tuple(Call(name, {"a": 1}, name[:3]) for name in names)
    ordered = [*((thought, "") for thought, _ in pieces), *(("", said) for _, said in pieces)]

    async def messages() -> Any:
        yield 0, Started()
        for thought, said in ordered:
            yield 0, Piece(said, thought, ())
        yield 0, Done(finish, text, thinking, calls, seen, "", 0, "new", 0, 0)

    async def collected() -> list[Any]:
        return [event async for event in stream_response(SimpleNamespace(name="x"), asked, messages())]  # type: ignore[arg-type]

    events = asyncio.run(collected())
    for event in events:
        ADAPTERS["responses"][1].validate_json(json.dumps(event), strict=True)
    output = events[-1]["response"]["output"]
    assert [x["item"] for x in events if x["type"] == "response.output_item.done"] == output
    assert [x["output_index"] for x in events if x["type"] == "response.output_item.added"] == [*range(len(output))]
    for index, item in enumerate(output):
        deltas = "".join(x["delta"] for x in events if x.get("output_index") == index and x["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if "arguments" in item else "".join(x["text"] for x in item["content"]))


def test_bytes_of_tokens_that_are_no_characters() -> None:
    """Of vocabularies that have pieces with bytes beside them; those of bytes only are tried above."""
    pieces = ["▁a", "<0xE2>", "é", "<s>"]
    added = {3: SimpleNamespace(content="<s>", special=True)}
    backend = SimpleNamespace(
        decoder="Sequence", id_to_token=pieces.__getitem__, get_added_tokens_decoder=lambda: added
    )
    texts = TokenTexts(SimpleNamespace(backend_tokenizer=backend))
    assert [texts.bytes_of(number) for number in range(4)] == [b" a", b"\xe2", "é".encode(), None]
    assert [texts.text_of(number) for number in (1, 3)] == [r"\xe2", "<s>"]
