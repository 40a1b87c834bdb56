"""Files of accelerate's, as accelerate itself writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.cluster.commands.accelerate import default_accelerate_file, read_accelerate_file
from fleetune.cluster.commands.command import read_command
from fleetune.errors import ConfigError


def test_what_accelerate_writes(tmp_path: Path) -> None:
    """Its own class writes the file, with every setting that it has; for several hosts, and JSON as well as YAML."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="MULTI_CPU", mixed_precision="bf16", use_cpu=True,
        debug=False, num_processes=8, num_machines=2, machine_rank=0, main_process_ip="10.1.0.10",
        main_process_port=29501, mpirun_config={"mpirun_hostfile": "hosts"},
    )  # fmt: skip
    config.to_yaml_file(str(tmp_path / "config.yaml"))
    config.to_json_file(str(tmp_path / "config.json"))
    for name in ("config.yaml", "config.json"):
        found = read_accelerate_file(tmp_path / name)
        assert found.facts == {
            "ranks": "8", "num_hosts": "2", "host_rank": "0", "hostfile": "hosts", "port": "29501",
            "mixed_precision": "bf16",
        }  # fmt: skip
        assert found.variables == {
            "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DEBUG_MODE": "false",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("distributed_type: MULTI_GPU\n", "distributed_type MULTI_GPU: NO or MULTI_CPU is expected"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n", "distributed_type FSDP"),
        ("deepspeed_config:\n  zero_stage: 3\n", "deepspeed_config: no flag of accelerate's file"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "LOCAL_MACHINE is expected"),
        ("mixed_precision: fp8\n", "mixed_precision fp8: no or bf16 is expected"),
        ("num_proceses: 2\n", "did you mean num_processes?"),
        ("num_processes: 2\nnum_processes: 3\n", "num_processes is given twice"),
        ("- a\n", "names with values are expected"),
    ],
)
def test_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_accelerate_file(tmp_path / "config.yaml")
    assert says in str(error.value)


def test_default_file(tmp_path: Path) -> None:
    """`accelerate launch` reads it unless told of another; its flags count above it."""
    environ = {"HF_HOME": str(tmp_path)}
    assert default_accelerate_file(environ) is None
    (tmp_path / "accelerate").mkdir()
    file = tmp_path / "accelerate/default_config.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\nmixed_precision: fp16\n")
    assert default_accelerate_file(environ) == file
    command = read_command(["accelerate", "launch", "--mixed_precision=bf16", "x.py"], environ)
    assert (command.settings, command.script) == ({"processes": 4}, ("x.py",))
    assert command.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert any(str(file) in notice for notice in command.notices)
    (tmp_path / "other.yaml").write_text("num_processes: 3\n")
    assert read_command(["x.py"], environ, config_file=tmp_path / "other.yaml").settings == {"processes": 3}
    command = read_command(["mpirun", "-n", "2", "x.py"], environ, config_file=tmp_path / "other.yaml")
    assert command.settings == {"processes": 2}  # the outer launcher decides where ranks are
