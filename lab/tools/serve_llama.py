"""Measures llama.cpp's first tokens of the conversations of `lab.tools.serve_sleep`, through llama-cpp-python.

python -m lab.tools.serve_llama MODEL.gguf --history 8000
"""

import argparse
import statistics
import time

from llama_cpp import Llama

from lab.tools.serve_sleep import Messages, long_history, shown, user
from tests.serve_load import TOPICS

REPLY = {"role": "assistant", "content": "Yes, I think that it is."}


def first_token_s(model: Llama, messages: Messages) -> float:
    """Seconds until the first token of a streamed reply. Tokens that the last prompt began with are not read again."""
    started = time.perf_counter()
    stream = model.create_chat_completion(messages, temperature=0, max_tokens=2, stream=True)  # type: ignore[arg-type]
    found = 0.0
    for chunk in stream:
        if not found and chunk["choices"][0]["delta"].get("content"):  # type: ignore[index]
            found = time.perf_counter() - started
    return found


def said(history: list[str]) -> Messages:
    """A history as messages."""
    return [message for text in history for message in (user(text), REPLY)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--history", type=int, default=8000)
    parser.add_argument("--samples", type=int, default=20)
    given = parser.parse_args()
    questions = [user(f"Tell me about {TOPICS[number % len(TOPICS)]} {number}.") for number in range(given.samples)]
    history = long_history(given.history)

    model = Llama(given.file, n_ctx=given.history + 4096, n_threads=2, n_threads_batch=2, verbose=False)
    fresh = []
    for question in questions:
        model.reset()
        fresh.append(first_token_s(model, [question]))
    print(f"a fresh conversation: {shown(fresh)}")
    messages = said(history)
    print(f"the history for the first time: {first_token_s(model, [*messages, questions[0]]):.2f} s")
    long = []
    for question in questions:
        messages += [question, REPLY]
        long.append(first_token_s(model, [*messages, question]))
    ratio = statistics.median(long) / statistics.median(fresh)
    print(f"the history ({model.n_tokens} tokens), read before: {shown(long)}, {ratio:.2f} times")

    half = Llama(given.file, n_ctx=given.history // 2, n_threads=2, n_threads_batch=2, verbose=False)
    kept, shifted = said(history[: len(history) // 2 - 3]), []
    first_token_s(half, [*kept, questions[0]])
    for question in questions[:3]:
        kept = [*kept[2:], question, REPLY]  # the client leaves out the oldest turn
        shifted.append(first_token_s(half, [*kept, question]))
    print(f"half of it, each time without its oldest turn: {shown(shifted)}")


if __name__ == "__main__":
    main()
