"""Formats that a model is written in, and how each is run again: one row of `FORMATS` for each."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetune.errors import ConfigError, ModelError
from fleetune.model.heads import ANSWERS
from fleetune.model.load import Classifier
from fleetune.model.quiet import quiet_transformers

Arrays = Mapping[str, NDArray[np.int64]]
"""Name of an input -> (B, L)."""
RunModel = Callable[[Arrays], list[NDArray[np.float32]]]
"""Padded inputs -> outputs, in the order of their names."""

INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a written model is given and gives."""

    inputs: tuple[str, ...]
    """int64 (batch, length) each; both may be of any size."""
    outputs: tuple[str, ...]
    """"logits" (batch, C) or (batch, length, C), or "start_logits" and "end_logits" (batch, length)."""


def signature_of(classifier: Classifier, tokenizer: Any) -> Signature:
    """The signature of a model: token types only where its tokenizer gives some."""
    names = tuple(name for name in INPUTS if name in ("input_ids", "attention_mask", *tokenizer.model_input_names))
    return Signature(
        inputs=names, outputs=("start_logits", "end_logits") if classifier.head.kind == ANSWERS else ("logits",)
    )


class PlainForward(nn.Module):
    """A model's own forward, from tensors to tensors.

    Args:
        model: Of transformers.
        signature: Names of what it is given and gives.
    """

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model, self.signature = model, signature

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Inputs and outputs in the order of the signature."""
        found = self.model(**dict(zip(self.signature.inputs, inputs, strict=True)), return_dict=True)
        return tuple(found[name] for name in self.signature.outputs)


class Format(ABC):
    """A format."""

    extra: str | None
    """Of fleetune's, that installs what is needed."""
    modules: tuple[str, ...]
    """What is needed."""
    file: str
    """That holds the model."""

    @abstractmethod
    def write(self, model: PlainForward, examples: Sequence[Tensor], folder: Path) -> None:
        """Write the model; `examples` are inputs to follow its forward with."""

    @abstractmethod
    def open(self, folder: Path, signature: Signature) -> RunModel:
        """What runs a written model in float32, on this host's CPU."""

    def quantize(self, folder: Path) -> None:
        """Replace a written model by one whose matrix products are of int8; scales of activations follow each batch.

        Raises:
            ConfigError: The format has no such thing.
        """
        raise ConfigError(f"--quantize int8 needs --format onnx: {self.file} has no dynamic quantisation here")


@final
class Onnx(Format):
    """ONNX, run by onnxruntime; the file names are those that optimum looks for."""

    extra, modules, file = "onnx", ("onnx", "onnxscript", "onnxruntime"), "model.onnx"

    def write(self, model: PlainForward, examples: Sequence[Tensor], folder: Path) -> None:
        """See `Format.write`."""
        write_onnx(model, examples, folder / self.file)

    def open(self, folder: Path, signature: Signature) -> RunModel:
        """See `Format.open`."""
        import onnxruntime

        session = onnxruntime.InferenceSession(str(folder / self.file), providers=["CPUExecutionProvider"])
        return lambda inputs: session.run(list(signature.outputs), dict(inputs))

    def quantize(self, folder: Path) -> None:
        """See `Format.quantize`."""
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with _quiet():
            quantize_dynamic(folder / self.file, folder / self.file, weight_type=QuantType.QInt8)


@final
class OpenVino(Format):
    """OpenVINO's own format, made from ONNX; the file names are those that optimum looks for."""

    extra, modules, file = "openvino", ("onnx", "onnxscript", "openvino"), "openvino_model.xml"

    def write(self, model: PlainForward, examples: Sequence[Tensor], folder: Path) -> None:
        """See `Format.write`."""
        import openvino

        between = folder / "between.onnx"
        write_onnx(model, examples, between)
        openvino.save_model(openvino.Core().read_model(between), folder / self.file, compress_to_fp16=False)
        for path in folder.glob("between.onnx*"):
            path.unlink()

    def open(self, folder: Path, signature: Signature) -> RunModel:
        """See `Format.open`."""
        import openvino

        compiled = openvino.Core().compile_model(folder / self.file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

        def run(inputs: Arrays) -> list[NDArray[np.float32]]:
            found = compiled(dict(inputs))
            return [np.asarray(found[name]) for name in signature.outputs]

        return run


@final
class Torch(Format):
    """A program of torch.export: `torch.export.load(path).module()`, without transformers."""

    extra, modules, file = None, (), "model.pt2"

    def write(self, model: PlainForward, examples: Sequence[Tensor], folder: Path) -> None:
        """See `Format.write`."""
        with _quiet():  # it warns of weights that are views of others
            torch.export.save(traced(model, examples), folder / self.file)

    def open(self, folder: Path, signature: Signature) -> RunModel:
        """See `Format.open`."""
        with _quiet():
            module = torch.export.load(folder / self.file).module()

        def run(inputs: Arrays) -> list[NDArray[np.float32]]:
            with torch.inference_mode():
                found = module(*(torch.from_numpy(inputs[name]) for name in signature.inputs))
            return [output.numpy() for output in found]

        return run


FORMATS: dict[str, Format] = {"onnx": Onnx(), "openvino": OpenVino(), "torch": Torch()}
"""`--format` -> format."""


def check_installed(name: str) -> None:
    """Refuse a format whose packages are not there.

    Raises:
        ConfigError: Names them, and the command that installs them.
    """
    chosen = FORMATS[name]
    missing = [module for module in chosen.modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"--format {name} needs {', '.join(missing)}, not installed here: pip install 'fleetune[{chosen.extra}]'"
        )


def traced(model: PlainForward, examples: Sequence[Tensor]) -> Any:
    """The model as a program for any batch size and length.

    Raises:
        ModelError: torch cannot follow its forward.
    """
    # Sizes that torch could take for constants would be: 1, and sizes that are equal by chance.
    shapes = (tuple({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for _ in examples),)
    try:
        with _quiet(), quiet_transformers(), torch.no_grad():
            return torch.export.export(model.eval(), tuple(examples), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever a model's Python does that torch cannot follow
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{type(model.model).__name__} cannot be exported by torch: {reason}") from error


def write_onnx(model: PlainForward, examples: Sequence[Tensor], path: Path) -> None:
    """Write a model as ONNX, one file where it is below 2 GB.

    Raises:
        ModelError: It has an operation that ONNX does not know.
    """
    program, signature = traced(model, examples), model.signature
    try:
        with _quiet():
            exported = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=signature.inputs, output_names=signature.outputs
            )
            assert exported is not None
            exported.save(path)
    except (RuntimeError, ValueError, torch.onnx.OnnxExporterError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{type(model.model).__name__} cannot be written as ONNX: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell of packages that are not needed, and of what will change in later versions of them."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "root", "")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
