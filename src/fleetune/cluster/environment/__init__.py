"""The same Python environment on every host, from this one's. See docs/setup.md."""
