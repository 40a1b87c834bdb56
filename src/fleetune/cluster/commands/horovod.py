"""The flags of horovodrun. Its scripts' own `hvd` is no torch.distributed: `fleetune launch` cannot serve those, but
`fleetune train` can take over what such a command trains. Source: horovod/runner/launch.py of Horovod 0.28."""

from __future__ import annotations

from fleetune.cluster.commands.flags import Flag, fact, refused, without
from fleetune.cluster.commands.retired import LOGS, MEETING, NO_MPI, PINNED

HOROVOD: tuple[Flag, ...] = (
    fact("np num_proc", "ranks"),
    fact("H hosts", "hosts"),
    fact("hostfile", "hostfile"),
    fact("network_interfaces network_interface", "interface"),
    without("gloo mpi tcp", NO_MPI),
    without("verbose disable_cache prefix_output_with_timestamp"),
    without("output_filename", LOGS, num_values=1),
    without("start_timeout gloo_timeout_seconds", MEETING, num_values=1),
    without("fusion_threshold_mb cycle_time_ms cache_capacity", "gradients travel in buckets, beside backward",
            num_values=1),
    without("binding_args", PINNED, num_values=1),
    refused("min_np max_np num_min_proc num_max_proc host_discovery_script", "the number of ranks is fixed here",
            num_values=1),
    refused("p ssh_port i ssh_identity_file", "put it into ~/.ssh/config, for these hosts", num_values=1),
)  # fmt: skip
