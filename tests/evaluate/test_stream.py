"""`fleetune predict` of files of any size: order, memory, going on after a death, every kind of task."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetune import RunConfig, finetune
from fleetune.cli import main
from fleetune.evaluate.growing import partial_of, progress_file_of
from tests.conftest import ANIMALS, FILLERS, environment, fleetune, make_tiny_model
from tests.train.kinds import KINDS

CHUNK = 64
FORMATS = ("csv", "tsv", "jsonl", "parquet")
IN_SMALL_CHUNKS = """
import sys, time
import fleetune.data.inputs
from fleetune.cli.main import main
fleetune.data.inputs.CHUNK_ROWS = int(sys.argv[1])
main(sys.argv[2:])
"""
WITH_PEAK = IN_SMALL_CHUNKS.replace(
    "main(sys.argv[2:])",
    """
from fleetune.cli.main import run
assert run(sys.argv[2:]) == 0
line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print("peak", int(line.split()[1]) * 1024)
""",
)
CONFIG: dict[str, Any] = {"learning_rate": 1e-3, "scale_lr": "none", "max_steps": 1, "report_to": "none", "threads": 1,
          "do_eval": False,
          "save_strategy": "no", "eval_strategy": "no"}  # fmt: skip


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices([*ANIMALS, *FILLERS], k=draw.randint(1, 20))) for _ in range(count)]


def write(path: Path, rows: list[str]) -> Path:
    """The texts in the layout of the file's suffix."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pydict({"text": rows}), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    else:
        path.write_text("text\n" + "".join(f"{text}\n" for text in rows))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, cache_dir: Path) -> Path:
    """A run of one step: what it predicts does not matter, only that it is the same each time."""
    folder = tmp_path_factory.mktemp("finished")
    labels = [f"{text},{'cat' if 'cat' in text else 'other'}" for text in texts(40)]
    (folder / "train.csv").write_text("text,label\n" + "\n".join(labels) + "\n")
    config = RunConfig(**CONFIG, model=str(tiny_model), train_file=folder / "train.csv", cache_dir=cache_dir,
                       output_dir=folder / "out")  # fmt: skip
    finetune(config)
    return folder / "out"


def command_of(model: Path, source: Path, output: Path, *more: object, script: str = IN_SMALL_CHUNKS) -> list[str]:
    words = [CHUNK, "predict", model, "--input", source, "--output", output, "--threads", 1, *more]
    return [sys.executable, "-c", script, *map(str, words)]


def predict(*args: Any, **options: Any) -> str:
    result = subprocess.run(command_of(*args, **options), capture_output=True, text=True, timeout=240,
                            env=environment(), check=False)  # fmt: skip
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetune.data.inputs.CHUNK_ROWS", CHUNK)


def predict_here(model: Path, source: Path, output: Path, *more: object) -> int:
    words = ["predict", model, "--input", source, "--output", output, "--threads", 1, "--processes", 1, *more]
    return main.run([str(word) for word in words])


class Killed(Exception):  # noqa: N818 - stands for a signal
    pass


def die_in_chunk(monkeypatch: pytest.MonkeyPatch, number: int, *, halfway: bool = False) -> None:
    """The chunk of this number, from 0, is not predicted; with `halfway`, some bytes of it are in the file."""
    from fleetune.evaluate.growing import GrowingFile

    append, calls = GrowingFile.append, [0]

    def dying(self: GrowingFile, data: bytes, progress: Any) -> None:
        if calls[0] == number:
            if halfway:
                os.write(self._descriptor, data[:37])
            raise Killed
        calls[0] += 1
        append(self, data, progress)

    monkeypatch.setattr(GrowingFile, "append", dying)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_in_the_files_order(finished: Path, tmp_path: Path, suffix: str) -> None:
    rows = texts(5 * CHUNK + 7, seed=1)
    output = tmp_path / "p.jsonl"
    assert predict_here(finished, write(tmp_path / f"in.{suffix}", rows), output) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    first = 1 if suffix in ("jsonl", "parquet") else 2
    assert [line["row"] for line in lines] == list(range(first, first + len(rows)))
    # A row is predicted as it is alone, wherever it stands: some of them by themselves.
    for i in (0, CHUNK - 1, CHUNK, len(rows) - 1):
        alone = tmp_path / "alone.out.jsonl"
        predict_here(finished, write(tmp_path / f"alone.{suffix}", [rows[i]]), alone)
        expected = json.loads(alone.read_text())
        assert lines[i]["probabilities"] == pytest.approx(expected["probabilities"], abs=2e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("number", "halfway"), [(0, False), (1, True), (3, False), (5, True)])
def test_a_run_that_died_goes_on_and_writes_the_same_bytes(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, halfway: bool
) -> None:
    source = write(tmp_path / "in.csv", texts(5 * CHUNK + 7, seed=2))
    predict_here(finished, source, tmp_path / "whole.jsonl")
    output = tmp_path / "p.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        die_in_chunk(patch, number, halfway=halfway)
        with pytest.raises(Killed):
            predict_here(finished, source, output)
    told = capsys.readouterr()
    last = 1 + number * CHUNK
    if number:
        assert f"predictions up to row {last} are kept in {partial_of(output)}: the same command goes on" in told.err
    assert not output.exists()
    predict_here(finished, source, output)
    assert (f"going on behind row {last}: {number * CHUNK} predictions are in" in capsys.readouterr().out) == (
        number > 0
    )
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"in.csv", "p.jsonl", "whole.jsonl"}


@pytest.mark.usefixtures("small_chunks")
def test_bad_rows_are_counted_over_a_run_that_died(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = texts(3 * CHUNK, seed=3)
    rows[5] = rows[CHUNK + 1] = rows[CHUNK + 2] = rows[2 * CHUNK + 9] = " "
    source, output = write(tmp_path / "in.csv", rows), tmp_path / "p.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        die_in_chunk(patch, 2)
        with pytest.raises(Killed):
            predict_here(finished, source, output, "--on_bad_row", "skip")
    capsys.readouterr()
    assert predict_here(finished, source, output) == 2  # a bad row is not to be left out now
    assert "row 7, column 'text': the text is empty" in capsys.readouterr().err
    predict_here(finished, source, output, "--on_bad_row", "skip")
    told = capsys.readouterr().out
    shown = ", ".join(f"row {row} (the text is empty)" for row in (7, CHUNK + 3, CHUNK + 4))
    assert f"{3 * CHUNK - 4} predictions in {output}; 4 bad rows left out: {shown}" in told
    assert len(output.read_text().splitlines()) == 3 * CHUNK - 4


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("change", ["input", "batch", "model"])
def test_what_would_predict_otherwise_is_not_gone_on_with(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    source, output = write(tmp_path / "in.csv", texts(3 * CHUNK, seed=4)), tmp_path / "p.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        die_in_chunk(patch, 2)
        with pytest.raises(Killed):
            predict_here(finished, source, output)
    capsys.readouterr()
    more: tuple[object, ...] = ()
    model = finished
    if change == "input":
        write(source, texts(3 * CHUNK, seed=5))
    if change == "batch":
        more = ("--per_device_eval_batch_size", 7)
    if change == "model":
        import shutil

        from safetensors.numpy import load_file, save_file

        model = tmp_path / "other"
        shutil.copytree(finished, model)
        weights = load_file(model / "model.safetensors")
        save_file({**weights, "classifier.bias": weights["classifier.bias"] + 1}, model / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
    predict_here(model, source, output, *more)
    told = capsys.readouterr().out
    reasons = {"input": "the input was", "batch": "--per_device_eval_batch_size was 32, is 7", "model": "the model was"}
    assert f"{partial_of(output)} is of another run and is begun anew: {reasons[change]}" in told
    predict_here(model, source, tmp_path / "whole.jsonl", *more)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_interrupted_command_keeps_whole_rows(finished: Path, tmp_path: Path) -> None:
    """Ctrl-C and a kill, wherever they come; the file is of whole rows up to what its progress says."""
    source = write(tmp_path / "in.jsonl", texts(60 * CHUNK, seed=6))
    predict(finished, source, tmp_path / "whole.jsonl")
    output = tmp_path / "p.jsonl"
    for number in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(command_of(finished, source, output), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env=environment())  # fmt: skip
        done = _rows_done(output)
        deadline = time.monotonic() + 120
        while _rows_done(output) <= done and process.poll() is None:
            assert time.monotonic() < deadline, "nothing was predicted"
            time.sleep(0.002)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        if process.returncode == 0:
            pytest.skip("this machine was faster than the signal")
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        if number == signal.SIGINT:
            assert re.search(r"predictions up to row [\d,]+ are kept in .*p\.jsonl\.partial", err), err
        progress = json.loads(progress_file_of(output).read_text())
        kept = partial_of(output).read_bytes()[: progress["num_bytes"]]
        assert kept.endswith(b"\n")
        assert kept.count(b"\n") == progress["num_predictions"] == progress["num_rows"] > done
    assert "going on behind row" in predict(finished, source, output)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def _rows_done(output: Path) -> int:
    try:
        return int(json.loads(progress_file_of(output).read_text())["num_rows"])
    except (OSError, ValueError):
        return 0


@pytest.mark.slow
def test_two_processes_write_the_same_and_go_on(finished: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.csv", texts(5 * 4096 + 11, seed=7))
    for processes in (1, 2):
        fleetune("predict", finished, "--input", source, "--output", tmp_path / f"{processes}.jsonl", "--threads", 1,
                 "--processes", processes)  # fmt: skip
    assert (tmp_path / "2.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
    output = tmp_path / "p.jsonl"
    command = [sys.executable, "-m", "fleetune", "predict", finished, "--input", source, "--output", output,
               "--threads", "1", "--processes", "2"]  # fmt: skip
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment())  # fmt: skip
    deadline = time.monotonic() + 120
    while _rows_done(output) == 0 and process.poll() is None:
        assert time.monotonic() < deadline, "nothing was predicted"
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    if process.returncode == 0:
        pytest.skip("this machine was faster than the signal")
    assert err.count("the same command goes on") == 1, err
    told = fleetune("predict", finished, "--input", source, "--output", output, "--threads", 1, "--processes", 2).stdout
    assert "going on behind row" in told
    assert output.read_bytes() == (tmp_path / "1.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_ten_times_the_rows_need_no_more_memory(finished: Path, tmp_path: Path, suffix: str) -> None:
    """Rows of 1,000 characters: 6 MB and 60 MB of text. A quarter of what is read more is the room of peaks."""
    filler = " ".join(random.Random(1).choices(FILLERS, k=200))[:980]
    peaks = []
    for count in (6_000, 60_000):
        source = write(tmp_path / f"{count}.{suffix}", [f"{text[:15]} {filler}" for text in texts(count)])
        told = predict(finished, source, tmp_path / "p.jsonl", script=WITH_PEAK)
        peaks.append(int(told.split("peak ")[1]))
        assert f"{count:,} predictions" in told
    assert peaks[1] - peaks[0] < 0.25 * 54e6, peaks


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_task_goes_on(
    name: str, tiny_model: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 rows in chunks of 64; a run that dies in the third goes on."""
    kind = KINDS[name]
    settings = kind.write(tmp_path / "data")
    finetune(RunConfig(**CONFIG, **settings, model=str(tiny_model), cache_dir=cache_dir, output_dir=tmp_path / "out"))
    draw = random.Random(8)
    source = tmp_path / f"new{kind.suffix}"
    source.write_text("\n".join(kind.row(draw, i) for i in range(200)) + "\n")
    predict_here(tmp_path / "out", source, tmp_path / "whole.jsonl")
    output = tmp_path / "p.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        die_in_chunk(patch, 2, halfway=True)
        with pytest.raises(Killed):
            predict_here(tmp_path / "out", source, output)
    predict_here(tmp_path / "out", source, output)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 200
    assert [line["row"] for line in lines] == sorted(line["row"] for line in lines)
    if name.startswith("questions"):
        assert [line["id"] for line in lines] == [f"q{i}" for i in range(200)]


def test_numbers_too(tiny_model: Path, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{text},{i / 7:.3f}\n" for i, text in enumerate(texts(30)))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}")
    finetune(RunConfig(**CONFIG, model=str(tiny_model), train_file=tmp_path / "train.csv", cache_dir=cache_dir,
                       output_dir=tmp_path / "out"))  # fmt: skip
    assert predict_here(tmp_path / "out", tmp_path / "train.csv", tmp_path / "p.jsonl") == 0
    assert "30 predictions in" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert {type(line["prediction"]) for line in lines} == {float}


def test_a_model_that_is_padded_goes_the_same_way(cache_dir: Path, tmp_path: Path) -> None:
    padded = make_tiny_model(tmp_path / "padded", position_embedding_type="relative_key")
    rows = "".join(f"{text},{'cat' if 'cat' in text else 'other'}\n" for text in texts(30))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}")
    finetune(RunConfig(**CONFIG, model=str(padded), train_file=tmp_path / "train.csv", cache_dir=cache_dir,
                       output_dir=tmp_path / "out"))  # fmt: skip
    assert predict_here(tmp_path / "out", tmp_path / "train.csv", tmp_path / "p.jsonl") == 0
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 30
