"""``h2o-compare speculation``: replies with guesses and without."""
