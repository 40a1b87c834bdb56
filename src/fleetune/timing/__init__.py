"""Where the time of a run goes: parts, clocks, traces. Imports nothing of the package."""
