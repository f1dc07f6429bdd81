"""The demo data and what makes it."""
