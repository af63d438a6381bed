"""``h2o-compare divergence``: how near decode steps are to the exact model."""
