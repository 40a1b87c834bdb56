"""Entry point: `fleetune` and `python -m fleetune`."""

from fleetune.cli.main import main

if __name__ == "__main__":
    main()
