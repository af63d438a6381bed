"""``h2o-compare locomo``: what recall finds for the questions of LoCoMo."""
