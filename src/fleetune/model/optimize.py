"""The fast encoder inside a Hugging Face model: for scripts that have a training loop, or `transformers.Trainer`.

The model stays the object that it was, with its class, config, parameters and head. Its encoder gets a forward that
takes the padding out, computes what is left by `FlatEncoder`, and puts the padding back. Whatever that forward does
not know how to compute goes through the encoder's own, so that nothing a model could do is lost.

Shape suffixes: B sequences, L padded length, T tokens that are computed, D hidden width.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel, modeling_outputs

from fleetune.errors import ConfigError, FleetuneWarning
from fleetune.kernels.library import raw_ops
from fleetune.kernels.random import mix64
from fleetune.model.calls import Call, Rows, positions_of, signature_of
from fleetune.model.draws import NO_DRAWS, Draws, Place, drawn_seed
from fleetune.model.families import FAMILIES, Family, find_backbone, part, problem_of
from fleetune.model.flat import FlatEncoder
from fleetune.model.intact import find_problem, is_stock, is_untouched
from fleetune.model.rates import dropout_rates

Model = TypeVar("Model")

_DTYPES = (torch.float32, torch.bfloat16)
_FIRST_TOKENS = "fleetune_first_tokens"
"""Keyword by which a classification model asks its encoder for no more than its head reads."""


def optimize(model: Model, dtype: torch.dtype | None = None) -> Model:
    """Make a Hugging Face encoder compute with fused kernels, and on no padding.

    Supported are the encoders of `FAMILIES` (BERT and MiniLM, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT,
    ALBERT, MPNet, ModernBERT) with any head or none. Class, config, parameters, `state_dict`, `save_pretrained`,
    signature and results stay the model's own; `Trainer`, accelerate and DDP see nothing new. Call it before or after
    `train`, `eval`, `load_state_dict`, `gradient_checkpointing_enable`, `resize_token_embeddings` or building an
    optimizer, but before a model is wrapped (DDP, `torch.compile`, adapters). Twice does no harm.

    Results are those of the model's own forward but for the rounding of sums, with two exceptions. Where the attention
    mask is 0, `last_hidden_state` is 0, unless in the first column, which heads read, and for question answering, whose
    loss runs over every position: labels of padding must be -100, as collators give them. And where a
    `...ForSequenceClassification` of transformers calls it, its last layer computes the first tokens alone and
    `last_hidden_state` is (B, 1, D).

    In training the dropout masks come from torch's generator, which `torch.manual_seed` sets, and from the rank where a
    process group is initialised. They are not the masks that the model's own forward would have drawn.

    A call goes through the model's own forward, as if nothing had been done, if

    * it asks for hidden states, attentions, a cache or a causal mask, or gives `inputs_embeds`, a mask that is not
      (B, L), a sequence of which nothing is to be attended to, or a keyword that is not known here;
    * its attention counts tokens (MPNet, ModernBERT), and the mask has a 0 before a 1; or it is a ModernBERT for
      question answering, and there is padding;
    * it is traced or compiled, or autocast to another type than bfloat16, or a tensor is not on the CPU;
    * a parameter of the encoder is not float32, or a part of it was replaced (adapters, quantized layers) or has hooks.
      This holds for call after call, and is told once by a `FleetuneWarning`.

    The kernels know no gradients of gradients.

    Args:
        model: A `transformers.PreTrainedModel`; it is changed, not copied.
        dtype: What the encoder computes in: float32 (None is the same), or bfloat16 with float32 parameters, sums and
            results. Under `torch.autocast("cpu", torch.bfloat16)` it is always bfloat16.

    Returns:
        The same model. One that is not supported is returned as it was, with a `FleetuneWarning`.

    Raises:
        ConfigError: The dtype is another one.
    """
    dtype = torch.float32 if dtype is None else dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype}: None, torch.float32 or torch.bfloat16 is expected")
    if (reason := _reason_against(model)) is not None:
        warnings.warn(f"fleetune.optimize left the {type(model).__name__} as it was: {reason}", FleetuneWarning,
                      stacklevel=2)  # fmt: skip
        return model
    assert isinstance(model, PreTrainedModel)
    raw_ops()  # compiles the kernels where that was not done yet: now, not in the first step
    backbone: Any = model.base_model
    backbone.forward = FlatForward(backbone, dtype, every_position=_reads_every_position(model))
    backbone.forward.prepare()
    if (
        _is_classifier(model)
        and _takes_any_keyword(model)
        and _ask_for_first_tokens not in model._forward_pre_hooks.values()
    ):
        model.register_forward_pre_hook(_ask_for_first_tokens, with_kwargs=True)
    return model


def _reason_against(model: Any) -> str | None:
    """Why a model is not supported, and what to do; None if it is."""
    if not isinstance(model, PreTrainedModel):
        return "it is no PreTrainedModel of transformers; if it wraps one, pass that"
    if (problem := problem_of(model.config)) is not None:
        return f"{problem}; use it without optimize"
    if find_backbone(model) is None:
        return f"supported are the encoders of {', '.join(FAMILIES)} as transformers has them; use it without optimize"
    if "forward" in vars(model.base_model) and not _is_optimized(model.base_model):
        return "its encoder's forward was replaced by something else; call optimize before that"
    return None


@final
class FlatForward:
    """The forward of one encoder, as an attribute of that very module: it goes along when that is copied or pickled.

    Args:
        backbone: The encoder.
        dtype: See `optimize`.
        every_position: Whether masked positions are wanted too.
    """

    __name__ = "forward"

    def __init__(self, backbone: Any, dtype: torch.dtype, *, every_position: bool) -> None:
        self._backbone, self._dtype, self._every_position = backbone, dtype, every_position
        self._told: set[str] = set()

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own forward, which Trainer and others read."""
        return signature_of(type(self._backbone).forward)

    def prepare(self) -> None:
        """Lay the weights out for the products, unless other processes count on them where they are."""
        encoder = self._encoder(self._dtype)
        if encoder is not None and not any(p.is_shared() for p in self._backbone.parameters()):
            encoder.lay_together()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `optimize`; arguments and results are those of the model's own forward."""
        if args and isinstance(args[0], nn.Module):  # bound to a module as a method: accelerate unwraps models so
            return FlatForward(args[0], self._dtype, every_position=self._every_position)(*args[1:], **kwargs)
        first_tokens, dtype = kwargs.pop(_FIRST_TOKENS, False), self._call_dtype()
        call = None if dtype is None else Call.of(self._backbone, args, kwargs)
        encoder = None if call is None or dtype is None else self._encoder(dtype)
        if call is not None and encoder is not None:
            positions_BL = positions_of(call, self._family, encoder.parts)
            rows = Rows.of(call, positions_BL, encoder.parts, every_position=self._every_position)
            if rows is not None:
                return self._output(self._hidden(encoder, rows, first_tokens), as_tuple=call.as_tuple)
        return type(self._backbone).forward(self._backbone, *args, **kwargs)

    @property
    def _family(self) -> Family:
        return FAMILIES[self._backbone.config.model_type]

    def _call_dtype(self) -> torch.dtype | None:
        """What to compute in now; None where it is not for us to compute."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        if not torch.is_autocast_enabled("cpu"):
            return self._dtype
        return torch.bfloat16 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else None

    def _encoder(self, dtype: torch.dtype) -> FlatEncoder | None:
        """The encoder as its modules are at this moment; None, and a word about why, where they are not ours to use.

        Nothing is kept from call to call: a copy, a replaced embedding, a cast are seen without anybody telling.
        """
        try:
            encoder = FlatEncoder(self._backbone, self._family, dtype)
            problem = find_problem(self._backbone, self._family, encoder.parts)
        except AttributeError as error:
            problem = f"a part of it is missing ({error})"
        if problem is None:
            return encoder
        if problem not in self._told:
            self._told.add(problem)
            warnings.warn(f"{type(self._backbone).__name__} computes by its own forward, which is slower: {problem}",
                          FleetuneWarning, stacklevel=2)  # fmt: skip
        return None

    def _hidden(self, encoder: FlatEncoder, rows: Rows, first_tokens: bool) -> Tensor:
        """The last hidden state, float32: (B, L, D), or (B, 1, D) where the first tokens are all that is read."""
        draws = _draws(dropout_rates(self._backbone, self._family), rows)
        with _without_autocast():
            if first_tokens and rows.attended is None:
                return encoder.first_tokens(rows.batch, draws).float().unsqueeze(1)
            return rows.padded(encoder.tokens(rows.batch, draws, rows.attended).float())

    def _output(self, hidden: Tensor, *, as_tuple: bool) -> Any:
        fields = {"last_hidden_state": hidden}
        pooled = None if self._family.pooled is None else self._family.pooled(self._backbone, hidden)
        if pooled is not None:
            fields["pooler_output"] = pooled
        output = getattr(modeling_outputs, self._family.output)(**fields)
        return output.to_tuple() if as_tuple else output


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """The encoder says of every tensor which type it is; autocast would round where float32 is meant."""
    if not torch.is_autocast_enabled("cpu"):
        return contextlib.nullcontext()
    return torch.autocast("cpu", enabled=False)


def _draws(rates: Mapping[Place, float], rows: Rows) -> Draws:
    """The dropout of a forward. Torch's generator moves on only where something is dropped."""
    if not any(rates.values()):
        return NO_DRAWS
    return Draws(seed=_seed(), step=0, token_keys=rows.token_keys, rates=rates)


def _seed() -> int:
    """From torch's generator, and of this rank: ranks that were seeded alike drop different things."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return drawn_seed() ^ mix64(rank)


def _is_optimized(backbone: Any) -> bool:
    """Whether its forward is ours, though somebody may have made a method of it."""
    forward = vars(backbone).get("forward")
    return isinstance(getattr(forward, "__func__", forward), FlatForward)


def _reads_every_position(model: Any) -> bool:
    """Whether the head's results depend on what the encoder gives for padding."""
    name = type(model).__name__
    summary = name.endswith("ForMultipleChoice") and getattr(model.config, "summary_type", "first") != "first"
    return name.endswith("ForQuestionAnswering") or summary


def _is_classifier(model: Any) -> bool:
    """Whether it is a sequence-classification model of transformers itself, not somebody's of that name."""
    kind = type(model)
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("ForSequenceClassification")


def _takes_any_keyword(model: Any) -> bool:
    parameters = signature_of(type(model).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _ask_for_first_tokens(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook before the forward of a classification model, which hands keywords on to the encoder."""
    if _is_optimized(model.base_model) and _reads_first_tokens_only(model):
        kwargs = {**kwargs, _FIRST_TOKENS: True}
    return args, kwargs


def _reads_first_tokens_only(model: Any) -> bool:
    """Whether forward and head are still transformers' own, and nobody looks on."""
    # A forward that autocast or accelerate wrapped is the same one inside.
    if inspect.unwrap(model.forward) is not inspect.unwrap(type(model).forward) or model.base_model._forward_hooks:
        return False
    family = FAMILIES[model.config.model_type]
    if family.reads_mean(model.config):
        return False
    if family.first_token_reader is None:
        return True
    reader = part(model, family.first_token_reader)
    return isinstance(reader, nn.Module) and is_stock(reader) and is_untouched(reader)
