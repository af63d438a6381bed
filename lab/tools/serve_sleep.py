"""Measures conversations that sleep, and first tokens: memory, wake times, and a long history that is sent again.

python -m lab.tools.serve_sleep http://127.0.0.1:8000 --pid PID --conversations 1000
python -m lab.tools.serve_sleep http://127.0.0.1:8000 --pid PID --history 8000
"""

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from lab.tools.serve_storm import resident
from tests.serve_load import QUESTIONS, TOPICS, post

Messages = list[dict[str, str]]


def user(text: str) -> dict[str, str]:
    """A message."""
    return {"role": "user", "content": text}


def first_token(url: str, messages: Messages, **more: Any) -> tuple[float, str]:
    """Seconds until the first token of a streamed reply, and the whole reply."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 2, "stream": True, **more})
    started, found, pieces = time.perf_counter(), 0.0, list[str]()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {"):
            pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
        if pieces and pieces[-1] and not found:
            found = time.perf_counter() - started
    connection.close()
    assert found
    return found, "".join(pieces)


def opened(url: str, number: int, tokens: int) -> Messages:
    """A conversation of one turn."""
    asked = user(QUESTIONS[0].format(f"{TOPICS[number % len(TOPICS)]} number {number}"))
    body = {"messages": [asked], "temperature": 0, "max_tokens": tokens}
    status, answer = post(url, "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert status == 200, answer
    return [asked, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]


def shown(seconds: Sequence[float]) -> str:
    """Median, 95th percentile and maximum."""
    ordered = sorted(seconds)
    high = ordered[int(0.95 * (len(ordered) - 1))]
    return f"median {statistics.median(ordered):.3f} s, 95% {high:.3f} s, maximum {ordered[-1]:.3f} s"


def measure_sleep(url: str, pid: int, conversations: int, awake: int, tokens: int, samples: int) -> None:
    """Open conversations, and take up some that sleep and some that do not."""
    with ThreadPoolExecutor(awake) as executor:
        talks = list(executor.map(lambda number: opened(url, number, tokens), range(awake)))
        print(f"{awake} opened: {resident(pid):.0f} MiB", flush=True)
        talks += executor.map(lambda number: opened(url, number, tokens), range(awake, conversations))
    print(f"{conversations} opened: {resident(pid):.0f} MiB", flush=True)
    draw, times = random.Random(0), {"asleep": list[float](), "awake": list[float]()}
    for place in draw.sample(range(conversations - 2 * awake), samples):
        talk = talks[place]
        for state, question in zip(times, QUESTIONS[1:], strict=False):  # the second one finds it awake
            seconds, reply = first_token(url, [*talk, user(question)])
            times[state].append(seconds)
            talk = [*talk, user(question), {"role": "assistant", "content": reply}]
    for state, seconds in times.items():
        print(f"first token of one that was {state}: {shown(seconds)}")
    print(f"then: {resident(pid):.0f} MiB")


def long_history(tokens: int) -> list[str]:
    """Messages of about so many tokens together, in turns of 200."""
    draw = random.Random(0)
    return [" ".join(draw.choice(TOPICS) for _ in range(180)) + f". Is that {turn}?" for turn in range(tokens // 200)]


def measure_history(url: str, tokens: int, samples: int, recall: str) -> None:
    """Compare a fresh short conversation with a long one that is sent again."""
    messages: Messages = []
    seen = 0
    for text in long_history(tokens):
        messages.append(user(text))
        body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 8, "recall": recall}
        status, answer = post(url, "/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert status == 200, answer
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        seen = answer["h2o"]["seen_tokens"]
    times = {"a fresh conversation": list[float](), "the history": list[float](), "an earlier state": list[float]()}
    for number in range(samples):
        question = user(f"Tell me about {TOPICS[number % len(TOPICS)]} {number}.")
        times["a fresh conversation"].append(first_token(url, [question], recall=recall)[0])
        seconds, reply = first_token(url, [*messages, question], recall=recall)
        times["the history"].append(seconds)
        times["an earlier state"].append(first_token(url, [*messages, user(f"{number} more?")], recall=recall)[0])
        messages += [question, {"role": "assistant", "content": reply}]
    fresh = statistics.median(times["a fresh conversation"])
    print(f"first tokens, after {seen} tokens that are known and sent again:")
    for name, seconds_of in times.items():
        print(f"{name}: {shown(seconds_of)}, {statistics.median(seconds_of) / fresh:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--conversations", type=int, default=0)
    parser.add_argument("--awake", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--history", type=int, default=0)
    parser.add_argument("--recall", default="auto")
    parser.add_argument("--samples", type=int, default=40)
    given = parser.parse_args()
    if given.conversations:
        measure_sleep(given.url, given.pid, given.conversations, given.awake, given.tokens, given.samples)
    if given.history:
        measure_history(given.url, given.history, given.samples, given.recall)


if __name__ == "__main__":
    main()
