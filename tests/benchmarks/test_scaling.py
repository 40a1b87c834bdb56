"""The scaling benchmark: its arithmetic by hand, and two real hosts once through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from lab import Lab


def turn(exchange: str, seconds: float, bytes_sent: float, hosts: int = 2, mbit: float = 80) -> dict[str, Any]:
    """A turn of 4 updates, the first two of which took ten times as long."""
    return {"hosts": hosts, "mbit": mbit, "exchange": exchange, "seconds": [10 * seconds] * 2 + [seconds] * 2,
            "bytes_sent": 4 * bytes_sent, "cpu_s": 0.5}  # fmt: skip


def test_efficiency_and_its_bound() -> None:
    """80 Mbit/s carry 9.56 MB of data a second: 19.12 MB take 2 s, twice the second that an update takes alone."""
    alone, exact = scaling.summarise([turn("alone", 1.0, 0), turn("exact", 2.5, 19.12e6)])
    assert (alone["efficiency"], alone["bound"], alone["bytes_per_update"]) == (1.0, 1.0, 0.0)
    assert exact["efficiency"] == pytest.approx(0.4)
    assert exact["bytes_per_update"] == 19.12e6
    assert exact["wire_s"] == pytest.approx(2.0)
    assert exact["bound"] == pytest.approx(0.5)
    assert "0.40 (0.40 to 0.40) | 0.50  | 80%" in scaling.table([exact])


def test_each_cluster_is_compared_with_its_own_time_alone() -> None:
    lines = scaling.summarise([
        turn("alone", 1.0, 0), turn("ddp", 4.0, 1e6),
        turn("alone", 2.0, 0, hosts=4), turn("ddp", 4.0, 1e6, hosts=4),
    ])  # fmt: skip
    assert [(line["hosts"], line["efficiency"]) for line in lines if line["exchange"] == "ddp"] == [(2, 0.25), (4, 0.5)]


@pytest.mark.slow
def test_two_real_hosts(packaged_model: Path, tmp_path: Path) -> None:
    """One turn of each exchange: all train alike; ours sends about half of what plain DDP sends, bfloat16 a quarter."""
    if reason := Lab.unavailable(with_quota=True):
        pytest.skip(reason)
    output = tmp_path / "scaling.json"
    words = [
        "--hosts",
        "2",
        "--mbit",
        "400",
        "--quota",
        "0.8",
        "--rounds",
        "1",
        "--steps",
        "3",
        "--output",
        str(output),
    ]
    scaling.main([*words, "--model", str(packaged_model)])
    result = json.loads(output.read_text())
    losses = {t["exchange"]: t["losses"] for t in result["turns"]}
    assert losses["exact"] == pytest.approx(losses["ddp"], rel=1e-4)
    assert losses["bfloat16"] == pytest.approx(losses["ddp"], rel=1e-2)
    sent = {line["exchange"]: line["bytes_per_update"] for line in result["summary"]}
    assert sent["alone"] < 0.01 * sent["ddp"]
    assert 85e6 < sent["ddp"] < 100e6  # 22.7 million numbers, half of each sent twice
    assert sent["exact"] < 0.55 * sent["ddp"]
    assert sent["bfloat16"] < 0.3 * sent["ddp"]
