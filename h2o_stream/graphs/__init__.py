"""Compiled decode steps: one graph for all decoder layers of a kind, made in the background and kept for next time.

A decoder layer that is handed one token does some forty small operations whose cost is mostly the call. Compiled ahead
of time (AOTInductor) it is one call. `trace` says what is compiled, `build` compiles it in a process of its own,
`artifacts` keeps the results, `steps` puts them into the layers of an attached model. Nothing else knows of it: the
model's own code and `SlotLayer.step` are what is traced, and where no graph is ready they are what runs.
"""
