"""What a run is asked to do: `RunConfig`, its names and aliases, and where it is read from."""

from fleetune.config.load import config_from_mapping, read_config_file, to_toml
from fleetune.config.run import RunConfig

__all__ = ["RunConfig", "config_from_mapping", "read_config_file", "to_toml"]
