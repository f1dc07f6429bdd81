"""Search without encoders, and the shared records of retrieval."""
