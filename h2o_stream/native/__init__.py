"""C++ of our own for what a CPU does for each token.

`src` knows neither Python nor torch and is compiled when the package is installed; `library` loads what that gave.
"""
