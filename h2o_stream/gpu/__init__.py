"""Triton kernels for GPUs: attention with eviction in a launch for each layer, and whole steps as CUDA graphs.

Modules other than `available` need Triton, which comes with torch for GPUs and is missing elsewhere.
"""
