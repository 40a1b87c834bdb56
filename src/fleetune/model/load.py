"""Models and tokenizers from a folder or the hub, with every reason why one cannot be used said plainly."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from fleetune.config import RunConfig
from fleetune.data.tasks import Task
from fleetune.data.tokens import TokenTable
from fleetune.errors import ModelError
from fleetune.model.adapter import Adapter
from fleetune.model.adapter_files import describe_head, merge_into, read_adapter, write_adapter
from fleetune.model.adapter_folder import adapter_files_of, base_of, is_adapter, read_adapter_config
from fleetune.model.families import FAMILIES, find_family, why_padded
from fleetune.model.flat import FlatClassifier
from fleetune.model.heads import HEADS, Head, kind_of
from fleetune.model.labels import LabelOrder, align_labels
from fleetune.model.padded import PaddedClassifier
from fleetune.model.quiet import quiet_transformers

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A model ready for flat batches, and what its outputs mean."""

    module: FlatClassifier | PaddedClassifier
    labels: LabelOrder | None
    """None for regression and questions."""
    notices: tuple[str, ...]
    head: Head = HEADS["classification"]
    has_new_head: bool = False
    """Whether weights of the head were drawn anew."""

    @property
    def hugging_face(self) -> Any:
        """The Hugging Face model that owns the parameters."""
        return self.module.model

    @property
    def adapter(self) -> Adapter | None:
        """Low-rank updates beside the model, in training."""
        return self.module.adapter if isinstance(self.module, FlatClassifier) else None

    @property
    def owner(self) -> nn.Module:
        """What has all parameters that learn: the model, or the module that has its low-rank updates, too."""
        model: nn.Module = self.hugging_face
        return model if self.adapter is None else self.module

    @property
    def num_labels(self) -> int:
        return int(self.hugging_face.config.num_labels)

    @property
    def hidden_size(self) -> int:
        return int(self.hugging_face.config.hidden_size)

    @property
    def unpadded(self) -> bool:
        """Whether the model runs through the flat forward."""
        return isinstance(self.module, FlatClassifier)

    def labels_to_model(self, labels: NDArray[Any]) -> NDArray[Any]:
        """Class ids of the task as class ids of the model; scores and places stay as they are."""
        return labels if self.labels is None else self.head.to_model(labels, self.labels.to_model)


def load_tokenizer(config: RunConfig) -> Any:
    """The tokenizer of `--tokenizer_name`, or of the model.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    source = config.tokenizer_name or config.model
    assert source is not None
    if is_adapter(source) and not _has_tokenizer(Path(source)):
        source = base_of(config)
    if Path(source).is_dir() and not _has_tokenizer(Path(source)):
        raise ModelError(f"{source}: the folder holds no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...): "
                         "copy one there or name one with --tokenizer_name")  # fmt: skip
    with reading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source, **_access(config))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_model_config(config: RunConfig) -> Any:
    """The Hugging Face config of the model; of an adapter, its model's with what is known of its head.

    Raises:
        ModelError: There is none, or it cannot be read.
    """
    from transformers import AutoConfig

    assert config.model is not None
    check_model_folder(config.model)
    source = base_of(config)
    if source != config.model:
        check_model_folder(source)
    with reading(source, "config"):
        found = AutoConfig.from_pretrained(source, **_access(config))
    if source != config.model:
        describe_head(found, Path(config.model))
    return found


def check_model_folder(source: str) -> None:
    """Refuse a folder that holds no model; a name that is no folder may be of the hub.

    Raises:
        ModelError: It is not there, or has no config or weights.
    """
    folder = Path(source)
    if not folder.exists() and source.startswith((".", "/", "~")):
        raise ModelError(f"--model {folder}: there is no such folder")
    if folder.is_dir():
        if is_adapter(folder):
            read_adapter_config(folder)
            return
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder}: no config.json: this is not a folder of a Hugging Face model")
        if not any((folder / name).is_file() for name in _WEIGHT_FILES):
            raise ModelError(f"{folder}: the folder holds no weights ({_WEIGHT_FILES[0]} or {_WEIGHT_FILES[2]})")


def check_tokenizer_fits(tokenizer: Any, model_config: Any, max_seq_length: int) -> int:
    """The sequence length to use: what was asked for, or less where the model has fewer positions.

    Raises:
        ModelError: The tokenizer makes ids that the model has no embedding for.
    """
    if len(tokenizer) > model_config.vocab_size:
        raise ModelError(f"the tokenizer has {len(tokenizer):,} tokens, the model embeds only "
                         f"{model_config.vocab_size:,}: they do not belong together")  # fmt: skip
    positions = getattr(model_config, "max_position_embeddings", None) or max_seq_length
    family = FAMILIES.get(model_config.model_type)
    if family is not None and family.positions_follow_padding:
        positions -= model_config.pad_token_id + 1
    return int(min(max_seq_length, positions))


def load_classifier(config: RunConfig, model_config: Any, task: Task, pad_token_id: int) -> Classifier:
    """The model with a head for the task: the checkpoint's where it means the same labels, else a new one.

    Args:
        config: The run's settings; the seed decides a new head's weights.
        model_config: What `load_model_config` gave; its labels are set to the task's.
        task: With its labels resolved.
        pad_token_id: For models that must be padded.

    Raises:
        ModelError: The weights cannot be read, or are not those of such a model.
    """
    head = HEADS[task.problem]
    labels = None if task.labels is None else align_labels(task.labels, model_config.id2label or {})
    names = head.label_names(None if labels is None else labels.names)
    keeps_head = labels.keeps_head if labels is not None else model_config.num_labels == len(names)
    keeps_head = keeps_head and kind_of(model_config) in (head.kind, None)
    _name_labels(model_config, names, head)
    torch.manual_seed(config.seed)
    source = base_of(config)
    with reading(source, "weights"):
        model, report = head.auto_class.from_pretrained(
            source, config=model_config, output_loading_info=True, ignore_mismatched_sizes=True,
            dtype=torch.float32, **_access(config),
        )  # fmt: skip
    absent = _absent_weights(model, report, source)
    if is_adapter(str(config.model)):
        there = merge_into(model, read_adapter(Path(str(config.model)))) if keeps_head else set()
        absent = [name for name in absent if name not in there]
    notices = [f"new weights, not in the checkpoint: {', '.join(absent)}"] if absent else []
    has_new_head = any(not name.startswith(f"{model.base_model_prefix}.") for name in absent)
    if not keeps_head and not has_new_head:
        _renew_head(model)
        has_new_head = True
        notices.append("the checkpoint's head is of other labels: it was replaced by a new one")
    family = find_family(model)
    module: FlatClassifier | PaddedClassifier
    if family is None:
        notices.append(f"{type(model).__name__} goes through its own forward, on padded batches, which is slower: "
                       f"{why_padded(model)}")  # fmt: skip
        module = PaddedClassifier(model, pad_token_id, head)
    else:
        module = FlatClassifier(model, family, reads_all_tokens=head.reads_all_tokens)
    return Classifier(module=module, labels=labels, notices=tuple(notices), head=head, has_new_head=has_new_head)


def _name_labels(model_config: Any, names: tuple[str, ...], head: Head) -> None:
    model_config.id2label = dict(enumerate(names))
    model_config.label2id = {name: i for i, name in enumerate(names)}
    model_config.problem_type = head.problem_type


def _absent_weights(model: Any, report: dict[str, Any], source: str) -> list[str]:
    """What the checkpoint lacked; weights of the encoder must all be there."""
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in report["mismatched_keys"]}
    absent = sorted(set(report["missing_keys"]) | mismatched)
    encoder = [k for k in absent if k.startswith(f"{model.base_model_prefix}.") and ".pooler." not in k]
    if encoder:
        kind = type(model).__name__
        raise ModelError(
            f"{source}: {len(encoder)} weights of a {kind} are missing or of another shape: {encoder[0]} ..."
        )
    return absent


def _renew_head(model: Any) -> None:
    """Draw the weights outside the encoder anew, as transformers draws them for a head that a checkpoint lacks."""
    encoder = {id(p) for p in model.base_model.parameters()}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) not in encoder:
                module.weight.normal_(0.0, getattr(model.config, "initializer_range", 0.02))
                if module.bias is not None:
                    module.bias.zero_()


def _access(config: RunConfig) -> dict[str, Any]:
    return {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}


@contextmanager
def reading(source: str, what: str) -> Iterator[None]:
    """Map the many ways in which transformers fails to one error."""
    try:
        with quiet_transformers():
            yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "" if Path(source).exists() else " (neither a folder here nor to be had from the hub?)"
        raise ModelError(f"--model {source}: the {what} cannot be loaded{hint}: {reason}") from error


def save_model(classifier: Classifier, tokenizer: Any, folder: Path, *, base: str, merge: bool = False) -> None:
    """Write model and tokenizer as `save_pretrained` does, or an adapter as peft does, so that these read them.

    Args:
        classifier: The model, maybe with an adapter.
        tokenizer: Its tokenizer.
        folder: Is there.
        base: Folder or hub name of the model as it was before.
        merge: Write a whole model, with the adapter added to its weights.
    """
    model, adapter = classifier.hugging_face, classifier.adapter
    with quiet_transformers():
        if adapter is None:
            model.save_pretrained(folder)
        elif merge:
            model.save_pretrained(folder, state_dict=model.state_dict() | adapter.merged_weights())
        else:
            write_adapter(folder, adapter, model, base=base, head_kind=classifier.head.kind)
        _let_others_read(folder)
        tokenizer.save_pretrained(folder)


def drop_other_weights(folder: Path) -> None:
    """Remove from an output folder what an earlier run of the other kind left there: a model beside a newer adapter,
    or an adapter beside a newer model."""
    whole, adapter = [folder / name for name in (_WEIGHT_FILES[0], "config.json")], adapter_files_of(folder)
    if not (whole[0].is_file() and adapter[0].is_file()):
        return
    is_adapter_newer = adapter[0].stat().st_mtime_ns > whole[0].stat().st_mtime_ns
    for path in whole if is_adapter_newer else adapter:
        path.unlink(missing_ok=True)


def with_model_labels(table: TokenTable, classifier: Classifier) -> TokenTable:
    """The split with its labels as the model's class ids."""
    if table.labels is None:
        return table
    return dataclasses.replace(table, labels=classifier.labels_to_model(table.labels))


def _let_others_read(folder: Path) -> None:
    """Give the weights the rights of any other new file: safetensors writes them for the owner alone."""
    os.umask(mask := os.umask(0))
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)
