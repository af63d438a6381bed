"""Turns tokens into tokens: prefill, decode, sampling and text pieces, as events. Draws nothing."""
