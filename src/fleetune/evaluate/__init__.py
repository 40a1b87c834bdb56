"""Predictions over a whole split, each example exactly once, and the metrics of a task."""
