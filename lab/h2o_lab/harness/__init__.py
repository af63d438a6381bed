"""The lm-evaluation-harness (extra ``eval``): a comparison, and its own command with our model."""
