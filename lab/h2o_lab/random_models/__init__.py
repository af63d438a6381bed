"""Models with random weights, stored like trained ones: for timing sizes that nobody downloads."""
