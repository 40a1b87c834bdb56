"""Repeated, measured runs: which sizes, in which order, each as a process of its own. Imports no torch."""
