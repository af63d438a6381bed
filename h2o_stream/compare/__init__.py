"""Comparisons of policies on equal input. Measures and yields results; draws nothing."""
