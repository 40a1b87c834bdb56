"""`fleetune export`: what other runtimes compute is what the model computes, and what they do not is not kept."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from fleetune import RunConfig, finetune
from fleetune.cli import main
from fleetune.cli.export import NAMES
from fleetune.errors import ConfigError, ModelError, OutputError
from fleetune.export.formats import FORMATS, Signature, check_installed
from fleetune.export.parity import Parity, padded_inputs
from tests.conftest import TinyData, make_tiny_model, read_json
from tests.evaluate.test_outputs import table_of
from tests.train.kinds import KINDS

CONFIG: dict[str, Any] = {"learning_rate": 3e-3, "scale_lr": "none", "report_to": "none", "threads": 1,
          "eval_strategy": "no",
          "save_strategy": "no"}  # fmt: skip


def export(*words: object) -> int:
    return main.run(["export", *map(str, words), "--threads", "1"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_data: TinyData, cache_dir: Path) -> Path:
    """A classifier of pairs."""
    folder = tmp_path_factory.mktemp("finished")
    model = make_tiny_model(folder / "model")
    config = RunConfig(**CONFIG, model=str(model), train_file=tiny_data.train, validation_file=tiny_data.validation,
                       cache_dir=cache_dir, output_dir=folder / "out", num_train_epochs=4)  # fmt: skip
    finetune(config)
    return folder / "out"


def needs(name: str) -> None:
    for module in FORMATS[name].modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the package `{module}` is not installed")


def run_of_shape(folder: Path, name: str, num_rows: int, length: int) -> list[NDArray[Any]]:
    """What an exported model gives for a batch of its own size: all ids 5, no types."""
    told = read_json(folder / "export.json")
    signature = Signature(inputs=tuple(told["inputs"]), outputs=tuple(told["outputs"]))
    values = {"input_ids": 5, "attention_mask": 1, "token_type_ids": 0}
    return FORMATS[name].open(folder, signature)(
        {name: np.full((num_rows, length), values[name], np.int64) for name in signature.inputs}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_format_computes_the_same_for_any_batch(
    finished: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(name)
    output = tmp_path / "exported"
    assert export(finished, "--format", name, "--output_dir", output) == 0
    told = capsys.readouterr().out
    assert "logits of 25 rows differ by up to " in told
    record = read_json(output / "export.json")
    assert record["largest_difference"] <= record["tolerated"]
    assert record["inputs"] == ["input_ids", "attention_mask", "token_type_ids"]
    assert {FORMATS[name].file, "config.json", "tokenizer.json", "export.json"} <= {p.name for p in output.iterdir()}
    assert not list(output.glob("between*"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(finished).eval()
    for num_rows, length in ((1, 3), (5, 17)):
        (found,) = run_of_shape(output, name, num_rows, length)
        ids = torch.full((num_rows, length), 5)
        with torch.no_grad():
            expected = model(ids, token_type_ids=torch.zeros_like(ids)).logits.numpy()
        np.testing.assert_allclose(found, expected, atol=1e-4)
    # Again: an export may be replaced, files of something else not.
    if name == "torch":
        assert export(finished, "--format", name, "--output_dir", output) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["labels", "tags", "questions"])
@pytest.mark.parametrize("name", ["onnx", "torch"])
def test_every_kind_of_task(name: str, kind: str, tiny_model: Path, cache_dir: Path, tmp_path: Path) -> None:
    needs(name)
    settings = KINDS[kind].write(tmp_path / "data")
    config = RunConfig(**CONFIG, **settings, model=str(tiny_model), cache_dir=cache_dir, output_dir=tmp_path / "out",
                       max_steps=2)  # fmt: skip
    finetune(config)
    assert export(tmp_path / "out", "--format", name) == 0
    record = read_json(tmp_path / "out" / name / "export.json")
    outputs = ["start_logits", "end_logits"] if kind == "questions" else ["logits"]
    assert record["outputs"] == outputs
    shapes = [found.shape for found in run_of_shape(tmp_path / "out" / name, name, 3, 11)]
    assert shapes == {"labels": [(3, 3)], "tags": [(3, 11, 4)], "questions": [(3, 11), (3, 11)]}[kind]


@pytest.mark.slow
def test_int8_tells_what_it_costs(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs("onnx")
    output = tmp_path / "int8"
    assert export(finished, "--format", "onnx", "--output_dir", output, "--quantize", "int8") == 0
    lines = capsys.readouterr().out.splitlines()
    record = read_json(output / "export.json")["int8"]
    assert record["rows"] == 25
    before, after = record["float32"], record["int8"]
    assert before["eval_accuracy"] == read_json(finished / "eval_results.json")["eval_accuracy"]
    assert abs(after["eval_accuracy"] - before["eval_accuracy"]) <= 0.2
    assert any(line.startswith(f"float32  loss {before['eval_loss']:.4f}") for line in lines)
    assert any(line.startswith(f"int8     loss {after['eval_loss']:.4f}") for line in lines)
    assert after["eval_loss"] != before["eval_loss"]
    import onnx

    operators = {node.op_type for node in onnx.load(output / "model.onnx").graph.node}
    assert "MatMulInteger" in operators
    with pytest.raises(ConfigError, match=r"--quantize int8 needs --format onnx: model.pt2 has no"):
        FORMATS["torch"].quantize(output)


@pytest.mark.slow
def test_a_model_that_computes_something_else_is_not_kept(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A format that loses the mask."""
    chosen = FORMATS["torch"]

    def wrong(folder: Path, signature: Signature) -> Any:
        run = type(chosen).open(chosen, folder, signature)
        return lambda inputs: run({**inputs, "attention_mask": np.ones_like(inputs["attention_mask"])})

    monkeypatch.setattr(chosen, "open", wrong)
    assert export(finished, "--format", "torch", "--output_dir", tmp_path / "x") == 2
    told = capsys.readouterr()
    assert "model.pt2 does not compute what the model computes: logits of 25 rows differ by up to" in told.err
    assert list((tmp_path / "x").iterdir()) == []


def test_the_tolerance_by_hand() -> None:
    # 1e-4 of the largest logit, and of 1 where all are smaller.
    Parity(num_sequences=2, largest_difference=9e-5, largest_logit=0.1).require("m")
    Parity(num_sequences=2, largest_difference=9e-4, largest_logit=10.0).require("m")
    for difference in (2e-4, float("nan")):
        with pytest.raises(ModelError, match="m does not compute what the model computes: logits of 2 rows"):
            Parity(num_sequences=2, largest_difference=difference, largest_logit=0.1).require("m")


def test_padding_by_hand() -> None:
    table = table_of((3, 1, 2), None)
    table.token_ids[:] = [7, 8, 9, 5, 3, 4]
    signature = Signature(inputs=("input_ids", "attention_mask", "token_type_ids"), outputs=("logits",))
    found = padded_inputs(table, np.array([2, 0]), signature, padding=1)
    assert found["input_ids"].tolist() == [[3, 4, 1], [7, 8, 9]]
    assert found["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert found["token_type_ids"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_format_whose_packages_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = r"--format openvino needs onnx, onnxscript, openvino, not installed here: pip install 'fleetune\[openvino\]'"
    with pytest.raises(ConfigError, match=told):
        check_installed("openvino")
    check_installed("torch")


def test_the_formats_of_the_command_are_those_there_are() -> None:
    assert set(NAMES) == set(FORMATS)


def test_a_folder_of_something_else_is_not_written_into(finished: Path, tmp_path: Path) -> None:
    from fleetune.export.program import ExportOptions, export_model

    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(OutputError, match="it is not empty and holds no export of fleetune"):
        export_model(RunConfig(model=str(finished)), ExportOptions(format="torch", output_dir=tmp_path))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the following arguments are required: --format"),
        (["--format", "tflite"], "argument --format: invalid choice: 'tflite'"),
        (["--format", "onnx", "--processes", "2"], "--processes is a setting of `fleetune train`"),
        (["--format", "onnx", "--quantize", "int4"], "argument --quantize: invalid choice: 'int4'"),
    ],
)
def test_what_the_command_refuses(
    finished: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["export", str(finished), *words]) == 2
    assert told in capsys.readouterr().err


def test_rows_to_compare_are_needed(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["export", str(tiny_model), "--format", "torch"]) == 2
    assert "no data: give --task with --data_dir, --validation_file" in capsys.readouterr().err
