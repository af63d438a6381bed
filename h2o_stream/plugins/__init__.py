"""What comes in by the entry points that other packages use (docs/extending.md). No other module names these."""
