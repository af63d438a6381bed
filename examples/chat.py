"""A chat on one screen: a conversation without end, in a cache of 256 tokens.

python examples/chat.py               # the embedded model
python examples/chat.py MODEL         # a folder, a GGUF file or a Hub id
"""

from __future__ import annotations

import sys

from h2o_stream import CacheConfig, Conversation, Engine, H2OStreamError, SamplingConfig
from h2o_stream.config import DEFAULT_MODEL, ModelConfig
from h2o_stream.engine.events import Token
from h2o_stream.loading.transformers_model import load
from h2o_stream.session.turn import Turn


def main(model: str = DEFAULT_MODEL) -> None:
    """Reply to each line of standard input, until it ends or Ctrl-C is pressed."""
    loaded = load(ModelConfig(model))
    sampling = SamplingConfig(temperature=0.2, max_tokens=200)
    with Engine(loaded.model, loaded.tokenizer, CacheConfig("h2o", window=256), sampling) as engine:
        conversation = Conversation(engine, "You are a helpful assistant.", loaded.stops, recall="auto")
        while True:
            try:
                message = input("> ")
                for event in conversation.say(message):
                    if isinstance(event, Token):
                        print(event.text, end="", flush=True)
                    elif isinstance(event, Turn):
                        counts, speed = event.counts, event.timings.decode_tok_s
                        print(f"\n[{counts.cached} of {counts.seen} tokens kept, {speed:.0f} tok/s]")
            except (EOFError, KeyboardInterrupt):
                return


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except H2OStreamError as error:
        sys.exit(str(error))
