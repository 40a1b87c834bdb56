"""Training: the program of one rank, from settings to the finished output folder."""
