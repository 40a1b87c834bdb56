"""What a run has to show: its record, and what the terminal says meanwhile. Imports no torch."""
