"""What a bench would run: sizes, order, settings of each run, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.bench.plan import BenchOptions, BenchPlan, make_plan
from fleetune.bench.sizes import host_word, make_sizes
from fleetune.cli.bench import numbers
from fleetune.cluster.hosts import parse_hosts
from fleetune.config import RunConfig
from fleetune.config.values import BadValue
from fleetune.errors import ConfigError
from tests.conftest import TinyData


@pytest.fixture
def config(tiny_data: TinyData, tiny_model: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        model=str(tiny_model), train_file=tiny_data.train, validation_file=tiny_data.validation,
        output_dir=tmp_path / "bench", threads=1,
    )  # fmt: skip


def plan_of(config: RunConfig, **options: object) -> BenchPlan:
    return make_plan(config, BenchOptions(**{"processes": (1, 2), **options}))  # type: ignore[arg-type]


def test_rounds_take_turns(config: RunConfig) -> None:
    turns = plan_of(config, repeat=2, against="transformers").turns()
    once = [
        ("1 process", "fleetune"),
        ("1 process", "transformers"),
        ("2 processes", "fleetune"),
        ("2 processes", "transformers"),
    ]
    assert [(turn.size.label, turn.trainer) for turn in turns] == 2 * once
    assert [turn.round for turn in turns] == [1] * 4 + [2] * 4
    assert len({turn.folder for turn in turns}) == 8


def test_a_run_by_steps_does_nothing_else(config: RunConfig) -> None:
    turn = plan_of(config, steps=30).turns()[1]
    told = turn.config
    assert (told.processes, told.max_steps, told.do_eval, told.save_strategy, told.logging_steps) == (
        2,
        33,
        False,
        "no",
        1,
    )
    assert told.output_dir == turn.folder
    assert (told.learning_rate, told.per_device_train_batch_size) == (config.learning_rate, 16)


@pytest.mark.parametrize(("options", "steps", "discarded"), [
    ({}, 50, 5), ({"steps": 5}, 5, 1), ({"steps": 100}, 100, 10), ({"steps": 5, "discard_steps": 0}, 5, 0),
])  # fmt: skip
def test_steps_and_discarded_steps(options: dict[str, int], steps: int, discarded: int, config: RunConfig) -> None:
    plan = plan_of(config, **options)
    assert (plan.steps, plan.discarded_steps) == (steps, discarded)


def test_a_full_run_is_the_users(config: RunConfig) -> None:
    plan = plan_of(config, full=True, seeds=2, repeat=3)
    told = [turn.config for turn in plan.turns() if turn.size.label == "1 process"]
    assert [one.seed for one in told] == [42, 43, 42]
    assert {(one.max_steps, one.do_eval, one.save_strategy) for one in told} == {(None, True, "epoch")}
    assert (plan.steps, plan.discarded_steps) == (None, 0)


def test_rounds_are_at_least_as_many_as_seeds(config: RunConfig) -> None:
    plan = plan_of(config, full=True, seeds=4, repeat=1)
    assert plan.rounds == 4
    assert [turn.seed for turn in plan.turns()[::2]] == [42, 43, 44, 45]


def test_the_warm_up_is_the_largest_size(config: RunConfig) -> None:
    (turn,) = plan_of(config).warm_ups()
    assert (turn.size.label, turn.config.max_steps, turn.round) == ("2 processes", 2, 0)
    assert turn.folder not in [one.folder for one in plan_of(config).turns()]


def test_the_plan_shows_global_batch_and_learning_rate_of_each_size(config: RunConfig) -> None:
    lines = list(plan_of(config.replace(scale_lr="sqrt", gradient_accumulation_steps=2)).lines())
    assert "  global batch   32 examples = 1 process x 16 x 2 accumulation steps" in lines
    assert "  global batch   64 examples = 2 processes x 16 x 2 accumulation steps" in lines
    assert "  learning rate  2e-05 x 1.41421 (--scale_lr sqrt, 2 processes) = 2.82843e-05, linear" in lines
    assert any(line.startswith("runs           6, 50 updates behind 5 uncounted") for line in lines)


def test_hosts_are_the_first_so_many(config: RunConfig) -> None:
    chosen = config.replace(hosts=("root@node1:2", "node2", "node[3-4]"))
    sizes = make_sizes(chosen, (4, 1, 2), None)
    assert [size.label for size in sizes] == ["1 host", "2 hosts", "4 hosts"]
    assert [size.changes["hosts"] for size in sizes] == [
        ("root@node1:2",), ("root@node1:2", "node2"), ("root@node1:2", "node2", "node3", "node4"),
    ]  # fmt: skip


def test_hosts_of_a_file_and_of_a_scheduler(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2\n")
    (_, both) = make_sizes(config.replace(hostfile=tmp_path / "hosts"), (1, 2), None)
    assert both.changes == {"hosts": ("node1:2", "node2"), "hostfile": None, "num_hosts": None, "processes": None}
    (_, four) = make_sizes(config.replace(launcher="slurm"), (2, 4), (3,))
    assert (four.label, four.changes) == ("4 hosts x 3 processes", {"num_hosts": 4, "processes": 3})


@pytest.mark.parametrize("word", ["node1", "me@node1:4", "[::1]:2", "::1", "10.0.0.1:8"])
def test_a_host_is_written_as_it_is_read(word: str) -> None:
    (host,) = parse_hosts(word)
    assert parse_hosts(host_word(host)) == (host,)


@pytest.mark.parametrize(("changes", "options", "problem"), [
    ({}, {"processes": None}, "which sizes"),
    ({}, {"nodes": (1, 2)}, "--nodes: on which hosts"),
    ({"hosts": ("localhost", "node2")}, {"nodes": (3,)}, "--nodes 3: 2 hosts are named"),
    ({"hosts": ("192.0.2.7",)}, {"nodes": (1,)}, "the first host must be this machine"),
    ({}, {"full": True, "steps": 5}, "--full trains to the end, --steps 5 does not"),
    ({}, {"seeds": 3}, "--seeds 3 needs --full"),
    ({}, {"repeat": 0}, "--repeat 0: 1 or more"),
    ({}, {"price_per_hour": -1.0}, "--price_per_hour -1: 0 or more"),
    ({}, {"against": "lightning"}, "--against lightning: transformers is expected"),
    ({"resume_from_checkpoint": "auto"}, {}, "goes on by itself"),
    ({"task": "mprc"}, {}, "mrpc"),
    ({"model": None}, {}, "--model is missing"),
])  # fmt: skip
def test_what_is_refused_before_anything_starts(
    changes: dict[str, object], options: dict[str, object], problem: str, config: RunConfig
) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_of(config.replace(**changes), **options)
    assert config.output_dir is not None
    assert not config.output_dir.exists()


def test_numbers() -> None:
    assert numbers("1, 2,4") == (1, 2, 4)
    for text in ("", "1,", "0,1", "a", "-1", "1.5"):
        with pytest.raises(BadValue, match="numbers from 1"):
            numbers(text)
