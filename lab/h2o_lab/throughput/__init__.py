"""``h2o-compare throughput``: whole batches in the same memory."""
