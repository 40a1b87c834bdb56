"""`fleetune env`: what a bug report needs, and no secret."""

from __future__ import annotations

import json
import platform

import pytest

from tests.conftest import fleetune

SECRETS = {"HF_TOKEN": "hf_secret", "WANDB_API_KEY": "wb_secret", "https_proxy": "http://me:secret@proxy:3128"}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def test_as_text() -> None:
    result = fleetune("env", OMP_NUM_THREADS="1")
    rows = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    told = {name: value.strip() for name, value in rows.items()}
    assert told["python"].startswith(platform.python_version())
    assert told["OMP_NUM_THREADS"] == "1"
    assert told["HF_TOKEN"] == "(not shown)"
    assert told["host"].startswith(platform.node())
    assert {"torch", "transformers", "CPU", "cores", "memory", "kernels", "compiler", "interfaces"} <= set(told)
    assert "secret" not in result.stdout


def test_as_json() -> None:
    result = fleetune("env", "--json")
    told = json.loads(result.stdout)
    assert told["software"]["versions"]["python"] == platform.python_version()
    assert told["machine"]["kernel"] == platform.release()
    assert not {"listeners", "remains"} & set(told)
    assert "secret" not in result.stdout
