"""``h2o-compare nll --masked``: tokens are masked instead of evicted, as h2o_hf simulates H2O."""
