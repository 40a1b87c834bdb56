"""What this machine is, and how to use it. Imports no torch, except in probes."""
