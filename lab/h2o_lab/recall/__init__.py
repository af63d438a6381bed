"""``h2o-compare recall``: facts told in a chat and asked for later."""
