"""From files to token tables: tasks, sources, examples, the memory-mapped token cache."""
