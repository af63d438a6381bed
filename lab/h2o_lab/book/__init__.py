"""Questions about a long book, in other words than its own, asked after it or a part of it was read once."""
