"""``h2o-compare all`` and ``h2o-compare report``: several comparisons, and a page of finished ones."""
