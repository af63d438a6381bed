"""``h2o-compare gpu``: everything that is said of GPUs, measured in minutes (``make gpu``)."""
