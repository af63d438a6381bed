"""``h2o-compare speed``: each engine in a process of its own."""
