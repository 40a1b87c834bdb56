"""Measurements behind the project's claims of speed and memory; see README.md. Run from the repository's folder."""
