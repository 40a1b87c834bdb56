"""What a network interface has sent and received, as the kernel counts it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NETWORK = Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes through an interface, headers and all that others sent included."""

    name: str
    sent_bytes: int
    received_bytes: int

    def since(self, before: Traffic) -> Traffic:
        """What came after an earlier reading."""
        return Traffic(name=self.name, sent_bytes=self.sent_bytes - before.sent_bytes,
                       received_bytes=self.received_bytes - before.received_bytes)  # fmt: skip


def read_traffic(name: str | None, network: Path = NETWORK) -> Traffic | None:
    """The counters of an interface since the machine started; None where there are none."""
    if not name:
        return None
    counters = network / name / "statistics"
    try:
        sent, received = (int((counters / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    except (OSError, ValueError):
        return None
    return Traffic(name=name, sent_bytes=sent, received_bytes=received)
