"""Sampling engines."""
