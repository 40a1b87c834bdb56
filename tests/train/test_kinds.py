"""The whole program for several labels, tags of words and questions: files, plain transformers, ranks, going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoTokenizer, pipeline

from fleetune import RunConfig, finetune
from fleetune.errors import ConfigError, DataError
from tests.conftest import fleetune, losses_of, make_tiny_model, read_json
from tests.train.kinds import COUNTS, KINDS
from tests.train.test_program import MODEL_FILES, RESULT_FILES

RUN = {"learning_rate": 3e-3, "scale_lr": "none", "report_to": "none", "threads": 1, "logging_steps": 1}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module", params=list(KINDS))
def finished(
    request: pytest.FixtureRequest, tiny_model: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """The name of the kind, its data, and the output folder of a run with predictions of the test split."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = KINDS[request.param].write(folder / "data")
    config = RunConfig(
        **RUN, **settings, model=str(tiny_model), do_predict=True, cache_dir=cache_dir, output_dir=folder / "out",
        num_train_epochs=KINDS[request.param].epochs, eval_strategy="no", save_strategy="no",
    )  # fmt: skip
    finetune(config)
    return request.param, folder / "data", folder / "out"


def test_the_files_and_what_was_learned(finished: tuple[str, Path, Path]) -> None:
    name, _, output = finished
    kind = KINDS[name]
    predictions = {"predictions_validation.jsonl", "predictions_test.jsonl"}
    assert {p.name for p in output.iterdir()} == MODEL_FILES | RESULT_FILES | predictions | kind.files
    results = read_json(output / "eval_results.json")
    assert results["eval_samples"] == COUNTS["validation"]
    assert results[kind.metric] >= kind.floor
    assert losses_of(output)[-1] < losses_of(output)[0] / 3


def test_plain_transformers_computes_the_same(finished: tuple[str, Path, Path]) -> None:
    """The model's own forward, a sequence at a time, gives the loss that the run reports."""
    name, data, output = finished
    kind = KINDS[name]
    model = getattr(transformers, kind.transformers_class).from_pretrained(output).eval()
    expected = read_json(output / "eval_results.json")["eval_loss"]
    tokenizer = AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        assert np.mean(LOSSES_OF[name](model, tokenizer, data)) == pytest.approx(expected, rel=1e-4)


def losses_of_labels(model: Any, tokenizer: Any, data: Path) -> list[float]:
    names = [model.config.id2label[i] for i in range(3)]
    assert (names, model.config.problem_type) == (["bird", "cat", "dog"], "multi_label_classification")
    return [
        model(**tokenizer(row["text"], return_tensors="pt"),
              labels=torch.tensor([[float(name in row["labels"]) for name in names]])).loss.item()
        for row in lines_of(data / "validation.jsonl")
    ]  # fmt: skip


def losses_of_tags(model: Any, tokenizer: Any, data: Path) -> list[float]:
    losses: list[float] = []
    for sentence in (data / "validation.conll").read_text().strip().split("\n\n"):
        words, _, tags = zip(*(line.split() for line in sentence.split("\n")), strict=True)
        encoded = tokenizer(list(words), is_split_into_words=True, return_tensors="pt")
        logits = model(**encoded).logits[0, 1:-1]  # each word of the tiny model is one token
        labels = torch.tensor([model.config.label2id[tag] for tag in tags])
        losses += torch.nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
    return losses


def losses_of_questions(model: Any, tokenizer: Any, data: Path) -> list[float]:
    losses = []
    for row in lines_of(data / "validation.jsonl"):
        encoded = tokenizer(row["question"], row["context"], truncation="only_second", max_length=24, stride=6,
                            return_overflowing_tokens=True, return_offsets_mapping=True)  # fmt: skip
        for i, ids in enumerate(encoded["input_ids"]):
            start = row["answers"]["answer_start"][0] if row["answers"]["text"] else -1
            tokens = [t for t, (a, _) in enumerate(encoded["offset_mapping"][i])
                      if encoded.sequence_ids(i)[t] == 1 and a == start]  # fmt: skip
            place = torch.tensor([tokens[0] if tokens else 0])
            types = torch.tensor([encoded["token_type_ids"][i]])
            output = model(torch.tensor([ids]), token_type_ids=types, start_positions=place, end_positions=place)
            losses.append(output.loss.item())
    return losses


LOSSES_OF = {
    "labels": losses_of_labels, "tags": losses_of_tags, "questions": losses_of_questions,
    "questions-v2": losses_of_questions,
}  # fmt: skip


def test_the_pipeline_reads_the_folder(finished: tuple[str, Path, Path]) -> None:
    name, data, output = finished
    first = lines_of(output / "predictions_validation.jsonl")[0]
    if name == "labels":
        text = lines_of(data / "validation.jsonl")[0]["text"]
        classify = pipeline("text-classification", str(output), device="cpu", top_k=None)
        found = {said["label"]: said["score"] for said in classify([text])[0]}
        assert found == pytest.approx(first["probabilities"], abs=1e-5)
        assert sorted(first["prediction"]) == sorted(name for name, p in found.items() if p > 0.5)
    elif name == "tags":
        tag = pipeline("token-classification", str(output), device="cpu", ignore_labels=[])
        assert [said["entity"] for said in tag(" ".join(first["words"]))] == first["prediction"]
    else:
        row = lines_of(data / "validation.jsonl")[0]
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(output)
        assert model.config.architectures == ["BertForQuestionAnswering"]
        assert first["prediction"] in row["context"]
        assert first["label"] == row["answers"]["text"]


def test_results_agree_with_the_files_of_predictions(finished: tuple[str, Path, Path]) -> None:
    name, _, output = finished
    lines, results = lines_of(output / "predictions_validation.jsonl"), read_json(output / "eval_results.json")
    if name == "labels":
        same = np.mean([set(line["prediction"]) == set(line["label"]) for line in lines])
        assert results["eval_accuracy"] == pytest.approx(same)
    elif name == "tags":
        pairs = [pair for line in lines for pair in zip(line["prediction"], line["label"], strict=True)]
        assert results["eval_accuracy"] == pytest.approx(np.mean([a == b for a, b in pairs]))
    else:
        told = read_json(output / "eval_predictions.json")
        assert told == {line["id"]: line["prediction"] for line in lines}
        best = read_json(output / "eval_nbest_predictions.json")
        assert all(sum(entry["probability"] for entry in of_one) == pytest.approx(1.0) for of_one in best.values())
        exact = [line["prediction"] == "".join(line["label"]) for line in lines]  # one answer or none, of one word
        assert results["eval_exact_match" if name == "questions" else "eval_exact"] == pytest.approx(
            100 * np.mean(exact)
        )
        if name == "questions-v2":
            odds = read_json(output / "eval_null_odds.json")
            assert {q for q, text in told.items() if text == ""} == {q for q, value in odds.items() if value > 0}
            assert results["eval_NoAns_total"] + results["eval_HasAns_total"] == results["eval_total"] == 25
            assert results["eval_best_exact"] >= results["eval_exact"]


def test_the_test_split_in_the_layout_of_the_example_scripts(finished: tuple[str, Path, Path]) -> None:
    name, _, output = finished
    lines = lines_of(output / "predictions_test.jsonl")
    if name == "labels":
        expected = [f"{i}\t{line['prediction']}" for i, line in enumerate(lines)]
        assert (output / "predict_results_custom.txt").read_text().splitlines() == ["index\tprediction", *expected]
    elif name == "tags":
        assert (output / "predictions.txt").read_text().splitlines() == [" ".join(line["prediction"]) for line in lines]
    else:
        assert read_json(output / "predict_predictions.json") == {line["id"]: line["prediction"] for line in lines}


def test_evaluate_and_predict_a_finished_run_on_two_processes(finished: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, data, output = finished
    ranks = ("--processes", 2, "--threads", 1)
    fleetune("evaluate", output, "--output", tmp_path / "e.json", "--output_dir", tmp_path / "e", *ranks)
    like_run_qa = {file for file in KINDS[name].files if file.startswith("eval_")}
    of_evaluation = {"eval_results.json", "predictions_validation.jsonl", *like_run_qa}
    assert {path.name for path in (tmp_path / "e").iterdir()} == of_evaluation
    if name.startswith("questions"):
        file = "eval_predictions.json"
        assert read_json(tmp_path / "e" / file) == read_json(output / file)
    found, expected = read_json(tmp_path / "e.json"), read_json(output / "eval_results.json")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if "runtime" not in key and "per_second" not in key:
            assert found[key] == pytest.approx(value, rel=1e-5), key
    fleetune("predict", output, "--input", data / f"test{KINDS[name].suffix}", "--output", tmp_path / "p.jsonl", *ranks)
    for line, known in zip(lines_of(tmp_path / "p.jsonl"), lines_of(output / "predictions_test.jsonl"), strict=True):
        assert (line["row"], line["prediction"]) == (known["row"], known["prediction"])
        assert "label" not in line


@pytest.mark.slow
def test_a_model_without_a_record_tells_what_its_head_is_for(finished: tuple[str, Path, Path], tmp_path: Path) -> None:
    name, data, output = finished
    for path in output.iterdir():
        if path.name in MODEL_FILES:
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    words = ("--input", data / f"test{KINDS[name].suffix}", "--output", tmp_path / "p.jsonl", "--threads", 1)
    more = {
        "labels": ("--text_column_names", "text"), "tags": (), "questions": ("--max_seq_length", 24, "--doc_stride", 6),
        "questions-v2": ("--max_seq_length", 24, "--doc_stride", 6, "--version_2_with_negative"),
    }  # fmt: skip
    fleetune("predict", tmp_path / "model", *words, *more[name])
    found = [line["prediction"] for line in lines_of(tmp_path / "p.jsonl")]
    assert found == [line["prediction"] for line in lines_of(output / "predictions_test.jsonl")]


def settings_of(name: str, folder: Path, model: Path, cache_dir: Path, **changes: Any) -> dict[str, Any]:
    settings = KINDS[name].write(folder / "data") | {"test_file": None}
    return {**RUN, **settings, "model": str(model), "cache_dir": cache_dir, "max_steps": 6, "eval_strategy": "no",
            "save_strategy": "no", **changes}  # fmt: skip


def train(output: Path, settings: dict[str, Any]) -> Path:
    words = [word for k, v in settings.items() if v is not None for word in (f"--{k}", str(v))]
    fleetune("train", "--output_dir", output, *words)
    return output


WITHOUT_EFFECT = ("bert.encoder.layer.1.output.LayerNorm.bias", "qa_outputs.bias")
"""Added to every token alike: the softmax over tokens does not see it, so that its gradient is rounding alone."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_n_processes_equal_one(name: str, tmp_path: Path, tiny_model_with_dropout: Path, cache_dir: Path) -> None:
    """Dropout on; sentences and windows of different lengths, so that ranks have unequal shares of what is learned."""
    settings = settings_of(name, tmp_path, tiny_model_with_dropout, cache_dir, learning_rate=1e-3)
    one = train(tmp_path / "one", settings | {"per_device_train_batch_size": 32})
    for splits in ({"processes": 2, "per_device_train_batch_size": 16},
                   {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}):  # fmt: skip
        other = train(tmp_path / "-".join(map(str, splits.values())), settings | splits)
        np.testing.assert_allclose(losses_of(other), losses_of(one), rtol=2e-5)
        for key, expected in load_file(one / "model.safetensors").items():
            if name.startswith("questions") and key in WITHOUT_EFFECT:
                continue
            found = load_file(other / "model.safetensors")[key]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-5, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labels", "tags", "questions"])
def test_resumed_equals_uninterrupted(
    name: str, tmp_path: Path, tiny_model_with_dropout: Path, cache_dir: Path
) -> None:
    settings = settings_of(name, tmp_path, tiny_model_with_dropout, cache_dir, save_strategy="steps", save_steps=2,
                           save_total_limit="none", processes=2)  # fmt: skip
    whole = train(tmp_path / "whole", settings)
    resumed = train(tmp_path / "resumed", settings | {"resume_from_checkpoint": whole / "checkpoint-2"})
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses_of(resumed) == losses_of(whole)
    kind = getattr(transformers, KINDS[name].transformers_class)
    assert kind.from_pretrained(whole / "checkpoint-4").config.num_labels >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tags", "questions"])
def test_a_model_without_a_flat_forward_trains_the_same(
    name: str, tmp_path: Path, tiny_model: Path, cache_dir: Path
) -> None:
    """Relative attention: the padded way, on one process and on two."""
    settings = settings_of(name, tmp_path, tiny_model, cache_dir, max_steps=3)
    padded = make_tiny_model(tmp_path / "padded", position_embedding_type="relative_key")
    record = finetune(RunConfig(**settings | {"model": str(padded)}, output_dir=tmp_path / "one", processes=None))
    assert record.plan["unpadded"] is False
    two = train(tmp_path / "two", settings | {"model": padded, "processes": 2, "per_device_train_batch_size": 8})
    np.testing.assert_allclose(losses_of(two), losses_of(tmp_path / "one"), rtol=2e-5)


def test_what_is_wrong_with_the_data_is_found_before_training(
    tiny_model: Path, cache_dir: Path, tmp_path: Path
) -> None:
    settings = settings_of("questions", tmp_path, tiny_model, cache_dir, output_dir=tmp_path / "out")
    with pytest.raises(ConfigError, match="--doc_stride 60 is too large for windows of --max_seq_length 24"):
        finetune(RunConfig(**settings | {"doc_stride": 60}))
    with pytest.raises(ConfigError, match=r"the task has loss, exact_match, f1 \(did you mean exact_match\?\)"):
        finetune(RunConfig(**settings | {"metric_for_best_model": "exact_mach"}))
    bad = settings["validation_file"].with_name("bad.jsonl")
    rows = settings["validation_file"].read_text().splitlines()
    bad.write_text("\n".join([*rows, rows[3]]))
    with pytest.raises(DataError, match="row 26, column 'id': the id 'q3' is that of row 4 too"):
        finetune(RunConfig(**settings | {"validation_file": bad}))
    assert not (tmp_path / "out" / "trainer_state.json").exists()
