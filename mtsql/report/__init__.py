"""Metrics, plots and the trajectory viewer."""
