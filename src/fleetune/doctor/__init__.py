"""Everything that would go wrong on the hosts of a run, found before it does."""
