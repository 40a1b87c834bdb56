"""Which machines take part, and how a command gets onto them. Imports no torch."""
