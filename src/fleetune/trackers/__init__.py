"""Experiment trackers: where a run's numbers go besides its record."""
