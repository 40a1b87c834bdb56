"""The command line: one module a command, each with `SUMMARY` and `run(arguments) -> exit status`."""
