"""A conversation: turns of text on top of the engine's tokens. Draws nothing."""
