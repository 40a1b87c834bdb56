"""Scripts that people have: transformers' examples with Trainer and with accelerate, and one of Lightning, as they are
and with the one line `model = fleetune.optimize(model)`: two ranks here, three hosts of a lab.

The examples are no part of transformers' wheel: a checkout's folder `examples/pytorch` is named by the variable
FLEETUNE_TRANSFORMERS_EXAMPLES, or lies where one would have put it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import fleetune as package
from lab import Lab
from tests.conftest import ANIMALS, FILLERS, REPOSITORY, TinyData, fleetune, read_json

pytestmark = pytest.mark.slow

VARIABLE = "FLEETUNE_TRANSFORMERS_EXAMPLES"
PLACES = ("~/transformers/examples/pytorch", "/usr/share/transformers/examples/pytorch",
          str(REPOSITORY.parent / "transformers/examples/pytorch"))  # fmt: skip
OFFLINE: dict[str, Any] = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
TRAINING = ("--per_device_train_batch_size", "3", "--num_train_epochs", "1", "--learning_rate", "1e-3", "--seed", "3")
TRAINER = ("--do_train", "--do_eval", "--use_cpu", "--disable_tqdm", "true", "--report_to", "none", "--save_strategy",
           "no", "--logging_steps", "1", *TRAINING)  # fmt: skip

# Without the hub, evaluate takes a metric from a folder of its name; these compute what the scripts ask for.
METRIC = """
import datasets
import evaluate


class Tiny(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": {predictions}, "references": {references}}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {result}
"""
_TEXT = 'datasets.Value("string")'
_ANSWERS = f'datasets.Sequence({{"text": {_TEXT}, "answer_start": datasets.Value("int32")}})'
METRICS = {
    "accuracy": METRIC.format(
        predictions='datasets.Value("int32")',
        references='datasets.Value("int32")',
        result='{"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}',
    ),
    "seqeval": METRIC.format(
        predictions=f"datasets.Sequence({_TEXT})",
        references=f"datasets.Sequence({_TEXT})",
        result='{"overall_" + name: float(predictions == references) for name in ("precision", "recall", "f1",'
        ' "accuracy")}',
    ),
    "squad": METRIC.format(
        predictions=f'{{"id": {_TEXT}, "prediction_text": {_TEXT}}}',
        references=f'{{"id": {_TEXT}, "answers": {_ANSWERS}}}',
        result='{"exact_match": 100.0 * sum(p["prediction_text"] in r["answers"]["text"] for p, r in'
        " zip(predictions, references)) / len(references)}",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One script and what it is given."""

    script: str
    flags: tuple[str, ...]
    data: Callable[[Path, TinyData], tuple[Path, Path]]
    """Writes its files, to train on and to evaluate with."""


def pairs(folder: Path, data: TinyData) -> tuple[Path, Path]:
    """run_glue.py wants numbers for labels."""
    for name, path in (("train", data.train), ("validation", data.validation)):
        text = path.read_text().replace(",cat\n", ",1\n").replace(",other\n", ",0\n")
        (folder / f"{name}.csv").write_text(text)
    return folder / "train.csv", folder / "validation.csv"


def _sentence(draw: random.Random) -> list[str]:
    return ["the", draw.choice(ANIMALS), *draw.choices(FILLERS, k=draw.randint(2, 9))]


def tags(folder: Path, data: TinyData) -> tuple[Path, Path]:
    """Animals are a kind of their own."""
    draw = random.Random(5)
    for name, count in (("train", 45), ("validation", 12)):
        rows = [_sentence(draw) for _ in range(count)]
        lines = [{"tokens": row, "ner_tags": ["B-A" if w in ANIMALS else "O" for w in row]} for row in rows]
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, lines)))
    return folder / "train.json", folder / "validation.json"


def questions(folder: Path, data: TinyData) -> tuple[Path, Path]:
    """The answer is the animal."""
    draw = random.Random(7)
    for name, count in (("train", 45), ("validation", 12)):
        rows = []
        for number in range(count):
            context = _sentence(draw)
            answers = {"text": [context[1]], "answer_start": [4]}
            rows.append({"id": f"{name}{number}", "title": "", "context": " ".join(context),
                         "question": "the animal", "answers": answers})  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps({"version": "1.1", "data": rows}))
    return folder / "train.json", folder / "validation.json"


_COLUMNS = ("--text_column_names", "sentence1,sentence2", "--label_column_name", "label")
_WINDOWS = ("--max_seq_length", "32", "--doc_stride", "8", "--max_answer_length", "4")
EXAMPLES = {
    "glue": Example(script="text-classification/run_glue.py", flags=("--max_seq_length", "32", *TRAINER), data=pairs),
    "classification": Example(
        script="text-classification/run_classification.py",
        flags=("--max_seq_length", "32", "--shuffle_train_dataset", *_COLUMNS, *TRAINER),
        data=pairs,
    ),
    "ner": Example(script="token-classification/run_ner.py", flags=TRAINER, data=tags),
    "qa": Example(script="question-answering/run_qa.py", flags=(*_WINDOWS, *TRAINER), data=questions),
    "glue_no_trainer": Example(
        script="text-classification/run_glue_no_trainer.py", flags=("--max_length", "32", *TRAINING), data=pairs
    ),
    "qa_no_trainer": Example(
        script="question-answering/run_qa_no_trainer.py", flags=(*_WINDOWS, *TRAINING), data=questions
    ),
}


def examples_folder() -> Path:
    """Where transformers' examples are; skips the test where they are not."""
    told = os.environ.get(VARIABLE)
    for place in (told,) if told else PLACES:
        folder = Path(str(place)).expanduser()
        if (folder / "text-classification/run_glue.py").is_file():
            return folder
    pytest.skip(f"transformers' example scripts are not on disk: set {VARIABLE} to a checkout's examples/pytorch")


def prepared(name: str, folder: Path, data: TinyData, model: Path, *, optimized: bool) -> list[str]:
    """The script's command in a folder with its metric and its data; skips where a library that it needs is missing."""
    example = EXAMPLES[name]
    source = examples_folder() / example.script
    for library in ("datasets", "evaluate"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    for metric, text in METRICS.items():
        (folder / metric).mkdir()
        (folder / metric / f"{metric}.py").write_text(text)
    script = source
    if optimized:
        shutil.copytree(source.parent, folder / "scripts")
        script = folder / "scripts" / source.name
        script.write_text(with_one_line(source.read_text()))
    train, validation = example.data(folder, data)
    output = ("--output_dir", "out", "--train_file", str(train), "--validation_file", str(validation))
    return [str(script), "--model_name_or_path", str(model), *output, *example.flags]


def with_one_line(text: str) -> str:
    """The script with `model = fleetune.optimize(model)` behind every place where its model is made."""
    text, count = re.subn(r"(?m)^( *)(model = AutoModel\w+\.from_pretrained\(\n(?:.*\n)*?\1\))$",
                          r"\1\2\n\1import fleetune; model = fleetune.optimize(model)", text)  # fmt: skip
    assert count == 1, "the place where the model is made"
    return text


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    return dict(load_file(folder / "out" / "model.safetensors"))


LIGHTNING = """
import os, sys
import pytorch_lightning as pl
import torch
from transformers import AutoModelForSequenceClassification

pl.seed_everything(3)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2)


class Classifier(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        ids, labels = batch
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


ids = torch.tensor([[2, 5 + i % 9, 3] for i in range(24)])
rows = torch.utils.data.TensorDataset(ids, torch.arange(24) % 2)
trainer = pl.Trainer(accelerator="cpu", devices=int(sys.argv[2]), num_nodes=int(sys.argv[3]), strategy="ddp",
                     max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Classifier(model), torch.utils.data.DataLoader(rows, batch_size=2))
print(f"rank {trainer.global_rank} of {trainer.world_size} made {trainer.global_step} steps", flush=True)
if trainer.is_global_zero:
    model.save_pretrained("out")
"""
"""The usual shape, its sizes from the command line; Lightning shares 24 rows out in batches of 2."""


def write_lightning(folder: Path, model: Path, *, devices: int, hosts: int, optimized: bool) -> list[str]:
    """The script's command; skips where Lightning is not installed."""
    if importlib.util.find_spec("pytorch_lightning") is None:
        pytest.skip("pytorch_lightning is not installed")
    made = "num_labels=2)\n"
    line = "import fleetune; model = fleetune.optimize(model)\n" if optimized else ""
    (folder / "script.py").write_text(LIGHTNING.replace(made, made + line))
    return ["script.py", str(model), str(devices), str(hosts)]


def assert_same_model(folder: Path, expected: Path, *, but_for: tuple[str, ...] = ()) -> None:
    """Weights after AdamW, which makes a step of a rate of 1e-3 out of a gradient's rounding."""
    weights = weights_of(folder)
    for key, values in weights_of(expected).items():
        if key not in but_for:
            np.testing.assert_allclose(weights[key], values, rtol=1e-3, atol=1e-4, err_msg=key)


NO_GRADIENT = ("qa_outputs.bias", "bert.encoder.layer.1.output.LayerNorm.bias")
"""What adds the same to all positions' logits changes nothing in the softmax over them: only rounding is left of its
gradient."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_ranks_on_this_machine(
    name: str, tiny_model: Path, tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, and with the one line: both train the same model, but for rounding."""
    for folder in (tmp_path / "as_it_is", tmp_path / "optimized"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        command = prepared(name, folder, tiny_data, tiny_model, optimized=folder.name == "optimized")
        result = fleetune("launch", "--processes", 2, *command, **OFFLINE, HF_HOME=str(tmp_path / "hf"))
        assert_ranks(result.stdout + result.stderr, 2)
    assert_same_model(tmp_path / "optimized", tmp_path / "as_it_is", but_for=NO_GRADIENT if "qa" in name else ())


def assert_ranks(said: str, count: int) -> None:
    """All examples tell their global batch, which is 3 rows of every rank."""
    told = re.findall(r"Total train batch size .*= (\d+)", said)
    assert told, said
    assert set(told) == {str(3 * count)}


def test_lightning_with_two_ranks(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "as_it_is", tmp_path / "optimized"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        command = write_lightning(folder, tiny_model, devices=2, hosts=1, optimized=folder.name == "optimized")
        result = fleetune("launch", "--processes", 2, *command, **OFFLINE)
        for rank in range(2):  # 24 rows are 6 steps of 2 rows on each of 2 ranks
            assert f"rank {rank} of 2 made 6 steps" in result.stdout, result.stdout + result.stderr
    assert_same_model(tmp_path / "optimized", tmp_path / "as_it_is")


ON_HOSTS = ("--hosts", "node[1-3]", "--threads", "1")


def on_three_hosts(folder: Path, command: list[str], own: tuple[str, ...] = ("launch", *ON_HOSTS)) -> str:
    """What fleetune says that is given a command on the first of three hosts of a lab, behind words of its own."""
    if reason := Lab.unavailable(with_ssh=True):
        pytest.skip(reason)
    environ = {**OFFLINE, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(Path(package.__file__).parents[1])}
    places = (folder, *(Path(word) for word in command if word.endswith(".py")))
    keep = {Path(*place.parts[:3]) for place in places if place.is_relative_to("/tmp")}
    with Lab.up(3, with_ssh=True, keep=sorted(keep)) as lab:
        words = [sys.executable, "-m", "fleetune", *own, *command]
        result = lab["node1"].run(words, env=environ, cwd=folder, timeout=280)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return str(result.stdout + result.stderr)


@pytest.mark.parametrize("name", EXAMPLES)
def test_three_hosts(name: str, tiny_model: Path, tiny_data: TinyData, tmp_path: Path) -> None:
    command = prepared(name, tmp_path, tiny_data, tiny_model, optimized=True)
    assert_ranks(on_three_hosts(tmp_path, command), 3)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_lightning_on_three_hosts(tiny_model: Path, tmp_path: Path) -> None:
    command = write_lightning(tmp_path, tiny_model, devices=1, hosts=3, optimized=True)
    said = on_three_hosts(tmp_path, command)
    assert "rank 0 of 3 made 4 steps" in said  # 24 rows are 4 steps of 2 rows on each of 3 ranks
    for host, rank in (("node2", 1), ("node3", 2)):
        assert f"rank {rank} of 3 made 4 steps" in (tmp_path / "logs" / f"{host}.{rank}.log").read_text()


GUIDE = ("-genv", "OMP_NUM_THREADS=1", "-genv", "I_MPI_PIN_DOMAIN=socket", "-genv", "CCL_WORKER_COUNT=1", "python3")
GUIDE_FLAGS = ("--no_cuda", "--xpu_backend", "ccl", "--use_ipex", "--bf16", "--overwrite_output_dir", "True")


def test_guides_command_on_three_hosts(tiny_model: Path, tiny_data: TinyData, tmp_path: Path) -> None:
    """As the guides have it, but for model and data: a host file, ranks, variables, and flags that are no more."""
    script = prepared("qa", tmp_path, tiny_data, tiny_model, optimized=True)
    script.remove("--use_cpu")
    (tmp_path / "hosts").write_text("node1 # the first one\nnode2\nnode3\n")
    command = ["mpirun", "-f", "hosts", "-n", "3", "-ppn", "1", *GUIDE, *script, *GUIDE_FLAGS]
    said = on_three_hosts(tmp_path, command, own=("launch",))
    assert_ranks(said, 3)
    for word in ("I_MPI_PIN_DOMAIN", "CCL_WORKER_COUNT", "--no_cuda", "--xpu_backend", "--use_ipex", "--overwrite"):
        assert len([line for line in said.splitlines() if line.startswith(word)]) == 1


def test_train_takes_over_a_guides_command_on_three_hosts(
    tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    """The lines of a guide as they are pasted, in quotes, but for model and data."""
    train, validation = questions(tmp_path, tiny_data)
    (tmp_path / "hosts").write_text("node1\nnode2\nnode3\n")
    files = f"--train_file {train} --validation_file {validation} --model_name_or_path {tiny_model}"
    guide = f"""
        source $oneccl_bindings_for_pytorch_path/env/setvars.sh
        export MASTER_ADDR=172.31.3.190
        export NUM_PROCESSES=3
        export CCL_WORKER_COUNT=2

        mpirun -f hosts -n $NUM_PROCESSES -ppn 1 \\
         {" ".join(GUIDE)} run_qa.py \\
         {files} --output_dir out {" ".join((*_WINDOWS, *TRAINING))} --do_train --do_eval {" ".join(GUIDE_FLAGS)}
    """
    said = on_three_hosts(tmp_path, [guide], own=("train", "--cache_dir", str(cache_dir)))
    record = read_json(tmp_path / "out" / "record.json")
    plan = record["plan"]
    assert (plan["processes"], plan["global_batch_size"], plan["dtype"]) == (3, 9, "bfloat16"), said
    assert len({entry["host"] for entry in record["roster"]}) == 3
    assert {"exact_match", "f1"} <= {name.removeprefix("eval_") for name in record["metrics"]}


@pytest.mark.parametrize("name", EXAMPLES)
def test_train_takes_over_from_each_example(
    name: str, tiny_model: Path, tiny_data: TinyData, cache_dir: Path, tmp_path: Path
) -> None:
    """The very flags that the script is given; the script need not be there."""
    example = EXAMPLES[name]
    train, validation = example.data(tmp_path, tiny_data)
    files = ("--train_file", train, "--validation_file", validation, "--output_dir", tmp_path / "out")
    fleetune("train", "--cache_dir", cache_dir, "torchrun", "--nproc_per_node", 2, Path(example.script).name,
             "--model_name_or_path", tiny_model, *files, *example.flags)  # fmt: skip
    record = read_json(tmp_path / "out" / "record.json")
    plan = record["plan"]
    assert (plan["processes"], plan["global_batch_size"], plan["learning_rate"]) == (2, 6, 1e-3)
    assert record["metrics"]  # as the script does, it was evaluated
