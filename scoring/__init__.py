"""Metrics of rankings and answers."""
