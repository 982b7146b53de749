"""Which blocks each token selects, found a segment of tokens at a time."""
