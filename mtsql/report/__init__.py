"""Scores, metrics, votes, and trajectory records."""
