"""What the facts mean: every check is a row of a table or a small function, from facts to findings."""
