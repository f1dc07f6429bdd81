"""Episodes: search and tools inside a response."""
