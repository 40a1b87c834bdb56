"""Adapters on disk, in peft's format: read into a model, and written so that `PeftModel.from_pretrained` reads them.

    adapter_config.json          which layers, rank and scale, and the model that the adapter belongs to
    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight and .lora_B.weight; whole weights of the head
    adapter_head.json            names of the labels, which peft keeps nowhere; ours alone, may be missing

The format is read and written here; peft itself is not needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fleetune.errors import ModelError
from fleetune.files import write_json
from fleetune.model.adapter import Adapter, ends_with
from fleetune.model.adapter_folder import ADAPTER_CONFIG, ADAPTER_HEAD, ADAPTER_WEIGHTS, read_adapter_config
from fleetune.model.heads import ANSWERS, SEQUENCE, TOKENS

_PREFIX = "base_model.model."
_TASK_TYPES = {SEQUENCE: "SEQ_CLS", TOKENS: "TOKEN_CLS", ANSWERS: "QUESTION_ANS"}
"""What peft calls models with each kind of head."""
_HEAD_OPTIONS = ("architectures", "id2label", "label2id", "problem_type")
"""Options of a model's config that say what its head is."""
_LAST_WEIGHTS = ("classifier.weight", "classifier.out_proj.weight")
"""Weights of the layers that give a row a label."""
_UNKNOWN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
}
"""Options that change what an adapter computes, and the values that are known here."""
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda")
"""Ways to begin an adapter that change the model's own weights, too."""


@dataclass(frozen=True, kw_only=True)
class SavedAdapter:
    """An adapter that was read."""

    folder: Path
    settings: Mapping[str, Any]
    """Of `adapter_config.json`."""
    downs: Mapping[str, Tensor]
    """A (r, I) of each layer, by its name in the model."""
    ups: Mapping[str, Tensor]
    """B (O, r)."""
    weights: Mapping[str, Tensor]
    """Whole weights, by their names in the model."""

    def scale_of(self, layer: str) -> float:
        """What B A of a layer is multiplied with."""
        alpha = _by_pattern(layer, self.settings.get("alpha_pattern"), self.settings["lora_alpha"])
        rank = len(self.downs[layer])
        return float(alpha) / (rank**0.5 if self.settings.get("use_rslora") else rank)


def _by_pattern(layer: str, patterns: Mapping[str, Any] | None, otherwise: Any) -> Any:
    """The value of the first pattern that fits the end of a layer's name."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            return value
    return otherwise


def read_adapter(folder: Path) -> SavedAdapter:
    """The adapter of a folder.

    Raises:
        ModelError: It cannot be read, or has an option that is not known here, which is named.
    """
    settings = read_adapter_config(folder)
    _check_known(folder, settings)
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS}: cannot be read ({error})") from error
    found: dict[str, dict[str, Tensor]] = {".lora_A.weight": {}, ".lora_B.weight": {}, "": {}}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        ending = next(ending for ending in found if name.endswith(ending))
        if "lora_" in name.removesuffix(ending):
            raise ModelError(f"{folder}: {key}: only updates of linear layers are known here")
        found[ending][name.removesuffix(ending)] = tensor.float()
    downs, ups, weights = found.values()
    if downs.keys() != ups.keys():
        raise ModelError(f"{folder}: lora_A and lora_B are of different layers: {sorted(downs.keys() ^ ups.keys())[0]}")
    return SavedAdapter(folder=folder, settings=settings, downs=downs, ups=ups, weights=weights)


def _check_known(folder: Path, settings: Mapping[str, Any]) -> None:
    for name, known in _UNKNOWN.items():
        if settings.get(name, known[0]) not in known:
            raise ModelError(
                f"{folder / ADAPTER_CONFIG}: {name}={settings[name]!r} is not known here, {known[0]!r} is: let peft "
                "merge the adapter (`merge_and_unload`), and give the merged model"
            )
    begun = settings.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.startswith(_CHANGE_THE_BASE):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG}: init_lora_weights={begun!r} changes the weights of the model that the adapter "
            "belongs to: let peft merge it (`merge_and_unload`), and give the merged model"
        )


@torch.no_grad()
def merge_into(model: nn.Module, saved: SavedAdapter) -> set[str]:
    """Add an adapter's updates to a model's weights, and put in the weights that it holds whole.

    Returns:
        Names of the weights that were put in.

    Raises:
        ModelError: It is of another model.
    """
    parameters = dict(model.named_parameters())
    for layer, down_rI in saved.downs.items():
        weight = _one_of(parameters, f"{layer}.weight", saved)
        up_or = saved.ups[layer]
        if up_or.shape[1:] != down_rI.shape[:1] or weight.shape != (len(up_or), down_rI.shape[1]):
            raise _of_another_model(saved, f"{layer}: {tuple(weight.shape)} is not {len(up_or), down_rI.shape[1]}")
        weight.add_(up_or @ down_rI, alpha=saved.scale_of(layer))
    put_in(parameters, saved)
    return set(saved.weights)


@torch.no_grad()
def put_in(parameters: Mapping[str, nn.Parameter], saved: SavedAdapter) -> None:
    """Overwrite parameters with the whole weights of an adapter.

    Raises:
        ModelError: It is of another model.
    """
    for name, tensor in saved.weights.items():
        parameter = _one_of(parameters, name, saved)
        if parameter.shape != tensor.shape:
            raise _of_another_model(saved, f"{name}: {tuple(parameter.shape)} is not {tuple(tensor.shape)}")
        parameter.copy_(tensor)


@torch.no_grad()
def restore(adapter: Adapter, model: nn.Module, saved: SavedAdapter) -> None:
    """Overwrite updates, and the weights beside them, with those of a checkpoint.

    Raises:
        ModelError: It is of another model.
    """
    own = adapter.by_name()
    if own.keys() != saved.downs.keys():
        raise _of_another_model(saved, f"it has updates of {len(saved.downs)} layers, not of {len(own)}")
    for name, update in own.items():
        for parameter, tensor in ((update.down, saved.downs[name]), (update.up, saved.ups[name])):
            if parameter.shape != tensor.shape:
                raise _of_another_model(saved, f"{name}: {tuple(parameter.shape)} is not {tuple(tensor.shape)}")
            parameter.copy_(tensor)
    put_in(dict(model.named_parameters()), saved)


def _one_of(parameters: Mapping[str, nn.Parameter], name: str, saved: SavedAdapter) -> nn.Parameter:
    if name not in parameters:
        raise _of_another_model(saved, f"there is no {name}")
    return parameters[name]


def _of_another_model(saved: SavedAdapter, why: str) -> ModelError:
    return ModelError(f"{saved.folder}: the adapter is of another model: {why}")


def write_adapter(folder: Path, adapter: Adapter, model: Any, *, base: str, head_kind: str) -> None:
    """Write an adapter as peft does, with the head of the model beside it.

    Args:
        folder: Is there.
        adapter: The updates.
        model: The model with its head.
        base: Folder or hub name of the model as it was before.
        head_kind: See `Head.kind`.
    """
    saved = modules_to_save(model)
    settings = adapter.settings
    alpha = int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha
    write_json(folder / ADAPTER_CONFIG, {
        "peft_type": "LORA", "task_type": _TASK_TYPES[head_kind], "base_model_name_or_path": base,
        "r": settings.r, "lora_alpha": alpha, "lora_dropout": settings.dropout, "bias": "none",
        "target_modules": targets_of(adapter, model), "modules_to_save": saved, "inference_mode": True,
        "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": False, "use_dora": False, "revision": None,
    })  # fmt: skip
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    write_json(folder / ADAPTER_HEAD, {name: config[name] for name in _HEAD_OPTIONS})
    tensors = {name: parameter for name, parameter in model.named_parameters() if _is_in(name, saved)}
    for name, update in adapter.by_name().items():
        tensors |= {f"{name}.lora_A.weight": update.down, f"{name}.lora_B.weight": update.up}
    save_file({_PREFIX + name: tensor.detach().contiguous() for name, tensor in tensors.items()},
              folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})  # fmt: skip


def modules_to_save(model: Any) -> list[str]:
    """The modules that learn beside the updates, by names that peft finds them by: the head, and a pooler it reads."""
    return list(dict.fromkeys(_heads(model)))


def _heads(model: Any) -> Iterator[str]:
    base = model.base_model_prefix
    for name, parameter in model.named_parameters():
        first, *rest = name.split(".")
        if first != base:
            yield first
        elif parameter.requires_grad:
            yield rest[0]


def describe_head(model_config: Any, folder: Path) -> None:
    """Put into the config of an adapter's model what is known of the adapter's head: labels, or how many there are.

    Raises:
        ModelError: The adapter cannot be read.
    """
    if (folder / ADAPTER_HEAD).is_file():
        for name, value in json.loads((folder / ADAPTER_HEAD).read_text(encoding="utf-8")).items():
            setattr(model_config, name, {int(i): n for i, n in value.items()} if name == "id2label" else value)
        return
    saved = read_adapter(folder)
    kinds = [kind for kind, task_type in _TASK_TYPES.items() if task_type == saved.settings.get("task_type")]
    model_config.architectures = kinds or model_config.architectures
    for name in _LAST_WEIGHTS:
        if name in saved.weights:
            model_config.num_labels = len(saved.weights[name])


def _is_in(parameter: str, modules: list[str]) -> bool:
    return any(ends_with(parameter[: place.start()], module)
               for module in modules for place in re.finditer(r"\.", parameter))  # fmt: skip


def targets_of(adapter: Adapter, model: nn.Module) -> list[str]:
    """Ends of names by which peft finds the updated layers and no others; their whole names where there are none."""
    wanted = set(adapter.by_name())
    ends = sorted({re.sub(r"^.*\.\d+\.", "", name) for name in wanted})
    meant = {name for name, _ in model.named_modules() if any(ends_with(name, end) for end in ends)}
    return ends if meant == wanted else sorted(wanted)
