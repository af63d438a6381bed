"""C++ of our own for what a decode step does on a CPU: matrices times few vectors, and the attention of one token.

`library` compiles it for this machine, once; `ops` makes operations of torch of it, which compiled graphs call too.
"""
