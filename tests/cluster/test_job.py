"""What a run takes along to other hosts, and what of it people see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fleetune.cluster.job import (
    ON_CPU,
    SETTINGS_VARIABLE,
    as_words,
    fleetune_job,
    forwarded,
    script_job,
    shown,
    shown_words,
)
from fleetune.config import RunConfig
from fleetune.config.load import read_config_file

SECRETS = {
    "HF_TOKEN": "hf_secret", "WANDB_API_KEY": "secret1", "MLFLOW_TRACKING_PASSWORD": "secret2",
    "https_proxy": "http://me:secret3@proxy:3128", "HF_ENDPOINT": "https://me:secret4@hub.example/x",
    "MLFLOW_TRACKING_URI": "https://secret5@mlflow.example",
}  # fmt: skip


def test_what_counts_elsewhere_is_forwarded() -> None:
    kept = {"OMP_NUM_THREADS": "4", "HF_HOME": "/data", "PYTHONPATH": "/x", "LC_ALL": "C", "GLOO_SOCKET_IFNAME": "e",
            "LD_PRELOAD": "x.so", "no_proxy": "*", "FLEETUNE_KERNELS": "reference", **SECRETS}  # fmt: skip
    left = {"PATH": "/bin", "HOME": "/root", "RANK": "0", "SSH_AUTH_SOCK": "/x", "DISPLAY": ":0", "HF_EMPTY": "",
            "XDG_RUNTIME_DIR": "/run/user/0", "TORCHELASTIC_RUN_ID": "1", "AWS_SECRET_ACCESS_KEY": "x",
            "FLEETUNE_LAUNCHER": "1", "MASTER_ADDR": "a", "SLURM_PROCID": "0"}  # fmt: skip
    assert forwarded(kept | left) == kept


def test_no_secret_is_shown() -> None:
    for text in (str(shown(SECRETS)), as_words(SECRETS, ["true"])):
        assert "secret" not in text
    assert shown(SECRETS)["HF_ENDPOINT"] == "https://(not shown)@hub.example/x"
    plain = {"TOKENIZERS_PARALLELISM": "true", "HF_HOME": "/a b", "OMP_NUM_THREADS": "2", "PYTHONPATH": "/x:/y"}
    assert shown(plain) == plain
    assert as_words(plain, ["python", "a b"]) == (
        "TOKENIZERS_PARALLELISM=true HF_HOME='/a b' OMP_NUM_THREADS=2 PYTHONPATH=/x:/y python 'a b'"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x.py", "--hub_token", "s", "--lr", "1"], ["x.py", "--hub_token", "(not shown)", "--lr", "1"]),
        (["x.py", "--api-key=s", "-v"], ["x.py", "--api-key=(not shown)", "-v"]),
        (["x.py", "--use_auth_token", "--fp16"], ["x.py", "--use_auth_token", "--fp16"]),
        (["x.py", "--db", "mysql://me:s@db/x"], ["x.py", "--db", "mysql://(not shown)@db/x"]),
        (["x.py", "--tokenizer_name", "bert"], ["x.py", "--tokenizer_name", "bert"]),
        (["x.py", "--max_tokens", "5"], ["x.py", "--max_tokens", "5"]),
        (["x.py", "--push_to_hub_token=s", ""], ["x.py", "--push_to_hub_token=(not shown)", ""]),
        (["x.py", "key", "token"], ["x.py", "key", "token"]),
    ],
)  # fmt: skip
def test_flags_that_hold_secrets(words: list[str], expected: list[str]) -> None:
    assert shown_words(words) == expected


def test_a_job_does_not_print_its_environment() -> None:
    job = script_job(["a.py", "--x"], SECRETS, processes=2)
    assert "secret" not in repr(job)
    assert dict(job.environ) == {**SECRETS, **ON_CPU}
    assert job.shown_environ() == shown({**SECRETS, **ON_CPU})
    assert (job.processes, job.timeout_s, job.cwd) == (2, 60, Path.cwd())


def test_what_runs_a_script() -> None:
    assert script_job(["a.py", "--x", "1"], {}).command == (sys.executable, "a.py", "--x", "1")
    assert script_job(["-m", "mod", "y"], {}).command == (sys.executable, "-m", "mod", "y")
    assert script_job(["./run.sh", "z"], {}).command == ("./run.sh", "z")


def test_settings_travel_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(train_file=Path("/data/größe 'x'.csv"), learning_rate=1e-4, hosts=("a", "b"))
    job = fleetune_job(
        ["train", "--x"], config.to_dict(), {"HF_HOME": "/x", SETTINGS_VARIABLE: "of an outer run"}, timeout_s=5
    )
    assert job.command == (sys.executable, "-m", "fleetune", "train", "--x", "--config", f"env:{SETTINGS_VARIABLE}")
    assert json.loads(job.environ[SETTINGS_VARIABLE]) == config.to_dict()
    monkeypatch.setenv(SETTINGS_VARIABLE, job.environ[SETTINGS_VARIABLE])
    assert RunConfig(**read_config_file(Path(f"env:{SETTINGS_VARIABLE}"))) == config
