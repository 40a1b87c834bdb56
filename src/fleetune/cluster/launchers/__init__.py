"""One module per way of starting ranks: each makes a plan that can be printed, and carries it out."""
