"""Commands of published guides, word by word, and what they mean here.

Each row names its source. What it must become is worked out by hand from what the guide says that its command does.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleetune.cli.pasted import split_command
from fleetune.cluster.commands.accelerate import ACCELERATE_FILE
from fleetune.cluster.commands.command import for_launch, for_train, read_command
from fleetune.cluster.commands.ipexrun import IPEXRUN
from fleetune.cluster.commands.retired import read_variables
from fleetune.cluster.commands.script import SCRIPT_FLAGS
from fleetune.cluster.commands.torchrun import TORCHRUN
from fleetune.errors import ConfigError
from tests.conftest import REPOSITORY

QA = """--model_name_or_path bert-large-uncased --dataset_name squad --do_train --do_eval
 --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384 --doc_stride 128
 --output_dir /tmp/debug_squad/"""
XEON_QA = """--model_name_or_path distilbert-base-uncased --dataset_name squad --do_train --do_eval
 --per_device_train_batch_size 32 --num_train_epochs 1 --output_dir /tmp/debug_squad/ --overwrite_output_dir"""
TRAINER_SCRIPT = "parser = HfArgumentParser((ModelArguments, TrainingArguments))\n"
FOUR = "172.31.3.190\n172.31.3.191\n172.31.3.192\n172.31.3.193\n"


@dataclass(frozen=True, kw_only=True)
class Guide:
    """One published command."""

    source: str
    command: str
    settings: dict[str, Any]
    script: str
    """The script and its own words under `fleetune launch`."""
    says: tuple[str, ...] = ()
    """What the lines are about, each of which tells of something that is left away or replaced."""
    files: dict[str, str] = field(default_factory=dict)
    """Files beside the script."""
    variables: dict[str, str] = field(default_factory=dict)


GUIDES = {
    "one Xeon": Guide(
        source="transformers 4.22, docs/source/en/perf_train_cpu_many.md: two processes on one Xeon, one a socket",
        command=f"mpirun -n 2 -genv OMP_NUM_THREADS=23 python3 run_qa.py {QA} --no_cuda --xpu_backend ccl --use_ipex",
        settings={"processes": 2, "threads": 23},
        script=f"run_qa.py {QA} --use_cpu --ddp_backend gloo",
        says=("--no_cuda", "--xpu_backend", "--use_ipex"),
    ),
    "two Xeons": Guide(
        source="transformers 4.30, the same guide: four processes on two Xeons, node0 the main one",
        command=f"mpirun -f hostfile -n 4 -ppn 2 -genv OMP_NUM_THREADS=23 python3 run_qa.py {QA} --no_cuda"
        " --ddp_backend ccl --use_ipex --bf16",
        files={"hostfile": "10.1.0.10 #node0 ip\n10.1.0.11 #node1 ip\n"},
        settings={"hostfile": "hostfile", "processes": 2, "threads": 23},
        script=f"run_qa.py {QA} --use_cpu --ddp_backend gloo --bf16",
        says=("--no_cuda", "--ddp_backend", "--use_ipex"),
    ),
    "today's guide": Guide(
        source="transformers 5, docs/source/en/perf_train_cpu.md: distributed CPU (multiple nodes)",
        command="mpirun -f hostfile -n 4 -ppn 2 -genv OMP_NUM_THREADS=23 python3 run_qa.py --bf16 --use_cpu",
        files={"hostfile": "10.1.0.10\n10.1.0.11\n"},
        settings={"hostfile": "hostfile", "processes": 2, "threads": 23},
        script="run_qa.py --bf16 --use_cpu",
    ),
    "Ice Lake": Guide(
        source="blog accelerating-pytorch: 'the first two nodes in hostfile will be selected'",
        command="mpirun -f hostfile -np 2 -ppn 1 -genv I_MPI_PIN_DOMAIN=[0xfffffff0] -genv OMP_NUM_THREADS=28"
        " python run_glue.py --model_name_or_path distilbert-base-uncased --task_name mrpc --do_train --do_eval"
        " --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3"
        " --output_dir /tmp/mrpc/ --overwrite_output_dir True --xpu_backend ccl --no_cuda True",
        files={
            "hostfile": "ip-172-31-28-17.ec2.internal\nip-172-31-30-87.ec2.internal\n"
            "ip-172-31-29-11.ec2.internal\nip-172-31-20-77.ec2.internal\n"
        },
        settings={"hosts": "ip-172-31-28-17.ec2.internal:1,ip-172-31-30-87.ec2.internal:1", "threads": 28},
        script="run_glue.py --model_name_or_path distilbert-base-uncased --task_name mrpc --do_train --do_eval"
        " --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3"
        " --output_dir /tmp/mrpc/ --ddp_backend gloo --use_cpu",
        says=("I_MPI_PIN_DOMAIN", "--overwrite_output_dir", "--xpu_backend", "--no_cuda"),
    ),
    "Sapphire Rapids": Guide(
        source="blog intel-sapphire-rapids: 4 nodes of 2 processes, with the exports that stand before the command",
        command=f"""
            # Activate the environment
            oneccl_bindings_for_pytorch_path=$(python -c "from oneccl_bindings_for_pytorch import cwd; print(cwd)")
            source $oneccl_bindings_for_pytorch_path/env/setvars.sh
            export MASTER_ADDR=172.31.3.190
            export NUM_PROCESSES=8
            export NUM_PROCESSES_PER_NODE=2
            export CCL_WORKER_COUNT=2
            export CCL_WORKER_AFFINITY=auto
            export KMP_HW_SUBSET=1T

            mpirun -f hosts \\
             -n $NUM_PROCESSES -ppn $NUM_PROCESSES_PER_NODE  \\
             -genv OMP_NUM_THREADS=24 \\
             -genv LD_PRELOAD="/usr/lib/x86_64-linux-gnu/libtcmalloc.so" \\
             python3 run_qa.py {XEON_QA.replace(chr(10), " ")} --no_cuda --xpu_backend ccl --bf16
            """,
        files={"hosts": FOUR},
        settings={"hostfile": "hosts", "processes": 2, "threads": 24},
        script=f"run_qa.py {XEON_QA.replace('--overwrite_output_dir', '')} --use_cpu --ddp_backend gloo --bf16",
        variables={"NUM_PROCESSES": "8", "NUM_PROCESSES_PER_NODE": "2"},
        says=(
            "source",
            "MASTER_ADDR",
            "CCL_WORKER_COUNT",
            "CCL_WORKER_AFFINITY",
            "KMP_HW_SUBSET",
            "LD_PRELOAD",
            "--overwrite_output_dir",
            "--no_cuda",
            "--xpu_backend",
        ),
    ),
    "Intel's tuning": Guide(
        source="a public script that searches run_qa.py's settings on a Xeon of two sockets",
        command="mpirun --bootstrap ssh -np 2 -ppn 2 -genv CCL_WORKER_COUNT=1 -genv I_MPI_PIN_DOMAIN=socket"
        " -genv OMP_NUM_THREADS=24 -genv HF_DATASETS_OFFLINE=1 python3 run_qa.py --no_cuda --xpu_backend ccl"
        " --logging_steps 500 --data_seed 0 --use_ipex --bf16",
        settings={"processes": 2, "threads": 24},
        script="run_qa.py --use_cpu --ddp_backend gloo --logging_steps 500 --data_seed 0 --bf16",
        variables={"HF_DATASETS_OFFLINE": "1"},
        says=("CCL_WORKER_COUNT", "I_MPI_PIN_DOMAIN", "--no_cuda", "--xpu_backend", "--use_ipex"),
    ),
    "Open MPI": Guide(
        source="accelerate 1.15, utils/launch.py: the mpirun command that it makes for Open MPI",
        command="mpirun --hostfile hosts --npernode 2 -n 8 --bind-to socket -x OMP_NUM_THREADS=12 -x PATH"
        " --mca btl_tcp_if_include 172.31.0.0/16 --mca pml ob1 -map-by ppr:2:node python run_glue.py",
        files={"hosts": FOUR},
        settings={"hostfile": "hosts", "processes": 2, "threads": 12, "network": "172.31.0.0/16"},
        script="run_glue.py",
        variables={"PATH": "/usr/bin"},
        says=("--bind-to", "--mca pml"),
    ),
    "mpirun of accelerate": Guide(
        source="accelerate, docs/source/usage_guides/intel_cpu.md: 16DDP in node0 to node3",
        command="mpirun -f hostfile -n 16 -ppn 4 accelerate launch nlp_example.py",
        files={"hostfile": FOUR},
        settings={"hostfile": "hostfile", "processes": 4},
        script="nlp_example.py",
        variables={"ACCELERATE_USE_CPU": "true"},
    ),
    "accelerate's file": Guide(
        source="the same guide: default_config.yaml and `accelerate launch`; ipex_config as in usage_guides/ipex.md",
        command="accelerate launch --config_file default_config.yaml nlp_example.py --cpu",
        files={
            "default_config.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\n"
            "downcast_bf16: 'no'\nipex_config:\n  ipex: true\nmachine_rank: 0\nmain_process_ip: 36.112.23.24\n"
            "main_process_port: 29500\nmain_training_function: main\nmixed_precision: bf16\n"
            "mpirun_config:\n  mpirun_ccl: '1'\n  mpirun_hostfile: hostfile\nnum_machines: 4\nnum_processes: 16\n"
            "rdzv_backend: static\nsame_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\n"
            "use_cpu: true\n",
            "hostfile": FOUR,
        },
        settings={"hostfile": "hostfile", "processes": 4, "port_range": "29500"},
        script="nlp_example.py --cpu",
        variables={"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
        says=(
            "default_config.yaml: ipex",
            "default_config.yaml: main_process_ip",
            "default_config.yaml: mpirun_ccl",
            "default_config.yaml: rdzv_backend",
        ),
    ),
    "accelerate's flags": Guide(
        source="accelerate launch --help of 1.15",
        command="accelerate launch --use_cpu --num_processes 2 --num_machines=1 --mixed_precision bf16"
        " --num_cpu_threads_per_process=12 --dynamo_backend no -m trainer.run --x 1",
        settings={"processes": 2, "threads": 12},
        script="-m trainer.run --x 1",
        variables={
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_DYNAMO_BACKEND": "no",
        },
    ),
    "torchrun": Guide(
        source="transformers, docs/source/en/perf_train_cpu_many.md for Kubernetes: torchrun run_qa.py; one process",
        command=f"torchrun run_qa.py {QA} --no_cuda --ddp_backend ccl --use_ipex --bf16",
        settings={"processes": 1},
        script=f"run_qa.py {QA} --use_cpu --ddp_backend gloo --bf16",
        says=("--no_cuda", "--ddp_backend", "--use_ipex"),
    ),
    "torch.distributed.launch": Guide(
        source="a guide to fine-tuning FLAN-T5 on CPUs: to be typed on each node; here once",
        command="python -m torch.distributed.launch --master_addr=10.1.0.10 --nproc_per_node=1 --nnodes=2"
        " --node_rank=0 finetune.py --bf16 True",
        settings={"processes": 1, "num_hosts": 2},
        script="finetune.py --bf16 True",
        says=("--master_addr",),
    ),
    "ipexrun": Guide(
        source="Intel Extension for PyTorch 2.x, docs/tutorials: multi-node distributed training, two nodes",
        command="ipexrun --nnodes 2 --nprocs-per-node=2 --hostfile hostfile --ccl-worker-count 4"
        " --logical-cores-for-ccl --memory-allocator tcmalloc run_glue.py --use_ipex",
        files={"hostfile": "192.168.10.10\n192.168.10.11\n192.168.10.12\n"},
        settings={"hosts": "192.168.10.10:2,192.168.10.11:2"},
        script="run_glue.py",
        says=("--ccl-worker-count", "--logical-cores-for-ccl", "--memory-allocator", "--use_ipex"),
    ),
    "Intel's launch": Guide(
        source="Intel Extension for PyTorch 1.10, launch script's guide: IV. your designated number of cores",
        command="python -m intel_extension_for_pytorch.cpu.launch --ninstances 1 --ncore_per_instance 10"
        " --log_path ./logs resnet50.py",
        settings={"processes": 1, "threads": 10},
        script="resnet50.py",
        says=("--log_path",),
    ),
    "Intel's launch, distributed": Guide(
        source="Intel Extension for PyTorch 1.x, launch.py: multi-node multi-process distributed training",
        command="python -m intel_extension_for_pytorch.cpu.launch --distributed --nproc_per_node=2 --nnodes=2"
        " --hostfile hostfile train.py",
        files={"hostfile": "192.168.10.10\n192.168.10.11\n"},
        settings={"hostfile": "hostfile", "processes": 2},
        script="train.py",
    ),
    "horovodrun": Guide(
        source="Horovod's README: 16 processes on 4 machines with 4 GPUs each",
        command="horovodrun -np 16 -H server1:4,server2:4,server3:4,server4:4 python train.py",
        settings={"hosts": "server1:4,server2:4,server3:4,server4:4"},
        script="train.py",
    ),
    "horovodrun here": Guide(
        source="Horovod's README: 4 processes on this machine",
        command="horovodrun -np 4 -H localhost:4 python train.py",
        settings={"processes": 4},
        script="train.py",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts of the names that guides use, which read their flags as transformers' examples do."""
    for name in ("run_qa.py", "run_glue.py"):
        (tmp_path / name).write_text(TRAINER_SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(guide: Guide) -> list[str]:
    """A command is pasted behind `fleetune launch`; lines of a shell as one word in quotes."""
    return [guide.command] if guide.command.startswith("\n") else shlex.split(guide.command)


@pytest.mark.parametrize("name", GUIDES)
def test_guide(name: str, folder: Path) -> None:
    guide = GUIDES[name]
    for file, text in guide.files.items():
        (folder / file).write_text(text)
    command = for_launch(read_command(words_of(guide), {"PATH": "/usr/bin", "HF_HOME": str(folder)}))
    assert command.settings == guide.settings
    assert command.script == tuple(shlex.split(guide.script))
    assert command.variables == guide.variables
    assert [line for line in command.notices if not line.startswith(guide.says or ("nothing",))] == []
    assert [word for word in guide.says if not any(line.startswith(word) for line in command.notices)] == []
    assert all(": " in line and "\n" not in line for line in command.notices)


def test_guide_of_squad_for_train(folder: Path) -> None:
    """The command of the issue's words: its script's flags are settings of `fleetune train`."""
    (folder / "hosts").write_text(FOUR)
    words = shlex.split(f"mpirun -f hosts -n 8 -ppn 2 -genv OMP_NUM_THREADS=24 python3 run_qa.py {XEON_QA} --no_cuda")
    command, flags = for_train(read_command(words, {}))
    assert command.settings == {
        "hostfile": "hosts", "processes": 2, "threads": 24, "problem_type": "question_answering",
        "learning_rate": 5e-5, "scale_lr": "none",
    }  # fmt: skip
    assert flags == shlex.split(f"{XEON_QA.replace('--do_train', '')} --no_cuda")


REFUSED = {
    "mpirun -n 2 --frobnicate 3 python train.py": "--frobnicate: no flag of mpirun that is known here",
    "mpirun -n 2 -pppn 1 python train.py": "did you mean ppn?",
    "mpirun -n two python train.py": "'two' is no number of ranks",
    "mpirun -n": "-n: a value is expected",
    "mpirun -f missing -n 2 python train.py": "missing: No such file",
    "mpirun -f hosts -n 9 -ppn 2 python train.py": "9 ranks do not fit: 4 hosts with 2 ranks each have 8",
    "mpirun -f hosts -n 6 python train.py": "6 ranks on 4 hosts: as many on each are expected",
    "mpirun -n 2 python a.py : -n 2 python b.py": "begins a second program",
    "mpirun -bootstrap slurm -n 2 python train.py": "--launcher slurm",
    "mpirun -wdir /data -n 2 python train.py": "go there first",
    "torchrun --nnodes 1:4 train.py": "the number of hosts is fixed here",
    "torchrun --nnodes 2 --node_rank 1 train.py": "host number 1: fleetune starts the ranks of all hosts from one",
    "accelerate launch --multi_gpu train.py": "--multi_gpu: fleetune works on CPUs",
    "accelerate launch --mixed_precision fp8 train.py": "no or bf16 is expected",
    "accelerate launch --config_file absent.yaml train.py": "absent.yaml: there is no such file",
    "accelerate launch --num_processes 3 --num_machines 2 train.py": "3 ranks on 2 hosts",
    "ipexrun --ninstances 4 train.py": "copies that know nothing of each other",
    "horovodrun -np 2 hvd.py": "talks through Horovod",
}
"""Command -> what the refusal says."""


@pytest.mark.parametrize("command", REFUSED)
def test_refused(command: str, folder: Path) -> None:
    (folder / "hosts").write_text(FOUR)
    (folder / "hvd.py").write_text("import horovod.torch as hvd\n")
    with pytest.raises(ConfigError) as error:
        for_launch(read_command(shlex.split(command), {}))
    assert REFUSED[command] in str(error.value)


PAGE = (REPOSITORY / "docs/scripts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if line.startswith("fleetune ")])
def test_the_pages_commands_are_understood(line: str, folder: Path) -> None:
    (folder / "hosts").write_text(FOUR)
    _, pasted = split_command(shlex.split(line)[2:])
    command = read_command([word for word in pasted if word != "..."], {})
    (for_train if line.startswith("fleetune train") else for_launch)(command)
    assert command.script[0].startswith("run_")
    assert bool(command.settings) == ("mpirun" in line)


def test_the_page_tells_of_what_is_gone(folder: Path) -> None:
    """Its first column: each flag is rewritten for scripts or told of by a launcher, each variable left away."""
    table = PAGE[PAGE.index("## What no longer exists") :]
    words = [word for line in table.splitlines() if line.startswith("| `") for word in
             re.findall(r"`([^`]+)`", line.split("|")[1])]  # fmt: skip
    assert len(words) > 20
    for word in words:
        name = word.removeprefix("--").split()[0].split("=")[0].replace("*", "ANY")
        flags = {n for table in (IPEXRUN, TORCHRUN, ACCELERATE_FILE) for flag in table for n in flag.names}
        is_flag = name in SCRIPT_FLAGS or name in flags or name in ("ipex_config", "ddp_backend", "bf16")
        is_variable = name.isupper() and name not in read_variables({name: "1"}).variables
        assert is_flag or is_variable or word.startswith("source "), word
