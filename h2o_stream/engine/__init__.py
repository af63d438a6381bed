"""Generates tokens: prefill, decoding, sampling and detokenization, as events. Nothing here prints."""
