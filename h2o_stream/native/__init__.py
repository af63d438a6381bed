"""Native CPU kernels for prefill and decode steps.

`src` is plain C++ without Python or torch, compiled when the package is installed; `library` loads the result.
"""
