"""The fixed-window cache: pure tensor functions, its layers, and how it is attached to a transformers model.

Shapes: B batch, Hq query heads, Hkv key/value heads, G = Hq / Hkv, Q new tokens, K visible keys, S slots, D head size.
"""
