"""``h2o-compare heavy-hitters``: the observations behind H2O."""
