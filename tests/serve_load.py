"""A bounded load on an h2o-serve on this machine: conversations of some turns, all at once and one after another.

python -m tests.serve_load http://127.0.0.1:8000 --conversations 64 --turns 4

With --words each begins with a long message, which is read before anything is timed. Other servers of the API will do.
"""

import argparse
import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

QUESTIONS = ("Tell me about {}.", "What else do you know?", "Why does that matter?", "Give an example.", "Sum it up.")
TOPICS = ("rivers", "trains", "bread", "moons", "birds", "glass", "tea", "maps")


def post(url: str, path: str, body: Any, key: str = "") -> tuple[int, Any]:
    """Status and JSON of an answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def converse(url: str, number: int, turns: int, tokens: int, history: Sequence[dict[str, str]] = ()) -> list[Any]:
    """The answers of a conversation, whose messages differ by its number; it begins after the history."""
    messages, answers = list(history), []
    for turn in range(turns):
        topic = f"{TOPICS[number % len(TOPICS)]} number {number}"
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)].format(topic)})
        status, answer = post(
            url, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": tokens}
        )
        assert status == 200, answer
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        answers.append(answer)
    return answers


def begun(url: str, number: int, words: int) -> list[dict[str, str]]:
    """The messages of a conversation that has begun with a text of so many words."""
    if not words:
        return []
    text = " ".join(f"{TOPICS[(number + word * word) % len(TOPICS)]} {word}" for word in range(words // 2))
    messages = [{"role": "user", "content": f"Conversation {number}. Keep this list. {text}"}]
    status, answer = post(url, "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 2})
    assert status == 200, answer
    return [*messages, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]


def texts(answers: Sequence[Any]) -> list[str]:
    """What was replied."""
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def together(
    url: str, numbers: Sequence[int], turns: int, tokens: int, words: int = 0
) -> tuple[list[list[Any]], float]:
    """The answers of several conversations at once, and tokens per second after their first messages of `words`."""
    with ThreadPoolExecutor(len(numbers)) as executor:
        histories = dict(zip(numbers, executor.map(lambda number: begun(url, number, words), numbers), strict=True))
        start = time.perf_counter()
        answers = list(executor.map(lambda number: converse(url, number, turns, tokens, histories[number]), numbers))
    replied = sum(answer["usage"]["completion_tokens"] for talk in answers for answer in talk)
    return answers, replied / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--alone", type=int, default=4)
    parser.add_argument("--words", type=int, default=0)
    given = parser.parse_args()
    alone = {}
    speeds = []
    for number in range(given.alone):
        (answers,), speed = together(given.url, [number], given.turns, given.tokens, given.words)
        alone[number] = texts(answers)
        speeds.append(speed)
    if speeds:
        print(f"alone: {sum(speeds) / len(speeds):.0f} tokens/s", flush=True)
    answers, speed = together(given.url, range(given.conversations), given.turns, given.tokens, given.words)
    wrong = [number for number, replies in alone.items() if texts(answers[number]) != replies]
    longest = max(answer["usage"]["total_tokens"] for talk in answers for answer in talk)
    print(f"{given.conversations} at once: {speed:.0f} tokens/s, up to {longest} tokens each")
    print(f"other replies than alone: {wrong or 'none'}")
    origins = {answer["h2o"]["origin"] for talk in answers for answer in talk[1:] if "h2o" in answer}
    if origins:
        print(f"later turns were {origins}")


if __name__ == "__main__":
    main()
