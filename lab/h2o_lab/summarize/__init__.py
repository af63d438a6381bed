"""``h2o-compare summarize`` and the ROUGE of answers."""
