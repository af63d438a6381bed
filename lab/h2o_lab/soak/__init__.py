"""``h2o-compare soak``: one very long stream."""
