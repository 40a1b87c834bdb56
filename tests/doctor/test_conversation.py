"""Talking to a probe, and to what is none."""

from __future__ import annotations

import sys
import time

import pytest

from fleetune.doctor.conversation import Conversation, NoAnswerError

PROBE = [sys.executable, "-m", "fleetune.doctor.probe", "node1"]


def test_a_probe_answers_and_ends() -> None:
    with Conversation(["sh", "-c", 'echo "Welcome to node1!"; exec "$@"', "sh", *PROBE]) as talk:
        before = time.time()
        assert before - 1 < talk.ask("clock", timeout_s=20)["time"] < time.time() + 1
        listening = talk.ask("listen", timeout_s=20, towards=None, network=None, ports=[21000, 21100], secret="s" * 32)
        assert listening["address"] == "127.0.0.1"
        wrong = talk.ask("listen", timeout_s=20)
        assert wrong["problem"].startswith("TypeError")
        assert "time" in talk.ask("clock", timeout_s=20)
        talk.close()


def test_a_network_that_the_host_is_not_in() -> None:
    with Conversation(PROBE) as talk:
        answer = talk.ask(
            "listen", timeout_s=20, towards=None, network="203.0.113.0/24", ports=[21000, 21100], secret="s" * 32
        )
    assert answer == {"address": None}


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["sh", "-c", "echo no such thing >&2; exit 127"], 127, "no such thing\n"),
        (["sh", "-c", "exec sleep 60"], None, ""),
    ],
)
def test_what_is_no_probe_does_not_answer(command: list[str], status: int | None, said: str) -> None:
    with Conversation(command) as talk:
        with pytest.raises(NoAnswerError) as failed:
            talk.ask("clock", timeout_s=1)
        assert (failed.value.status, failed.value.said, failed.value.within_s) == (status, said, 1)
        if status is None:
            talk._process.terminate()
