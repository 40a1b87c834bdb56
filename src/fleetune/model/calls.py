"""Calls of a Hugging Face encoder, and the tokens of their padded batches that have to be computed.

Shape suffixes: B sequences, L padded length, T tokens that are computed, D hidden width.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetune.data.batches import PackedBatch
from fleetune.kernels.random import row_keys
from fleetune.model.families import Family
from fleetune.model.parts import EncoderParts

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_CAPTURES = ("output_hidden_states", "output_attentions")
_IGNORED = "num_items_in_batch"
"""What Trainer hands to every model that takes keywords: the encoders let it pass."""


@functools.cache
def signature_of(forward: Any) -> inspect.Signature:
    """The signature of a forward, as a class has it, without self."""
    signature = inspect.signature(forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass(frozen=True, kw_only=True)
class Call:
    """What an encoder was called with, where that is all that the flat forward knows how to compute."""

    input_ids: Tensor
    """Integers (B, L), as all that follow."""
    attention_mask: Tensor | None
    token_type_ids: Tensor | None
    position_ids: Tensor | None
    as_tuple: bool
    """What to return."""

    @classmethod
    def of(cls, backbone: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The call; None where it is one for the model's own forward, which also says what is wrong with it."""
        try:
            given = dict(signature_of(type(backbone).forward).bind(*args, **kwargs).arguments)
        except TypeError:
            return None
        given |= given.pop("kwargs", {})
        config = backbone.config
        as_tuple = _or_configured(given, "return_dict", config) is False
        inputs = {name: given.pop(name, None) for name in _INPUTS}
        captures = [_or_configured(given, name, config) for name in _CAPTURES]
        given.pop(_IGNORED, None)
        if any(captures) or any(value is not None and value is not False for value in given.values()):
            return None
        return cls(**_alike(inputs), as_tuple=as_tuple) if _are_matrices(**inputs) else None


def _or_configured(given: dict[str, Any], name: str, config: Any) -> Any:
    """What was given, or else what the config says; taken out of what was given."""
    value = given.pop(name, None)
    return getattr(config, name) if value is None else value


def _are_matrices(*, input_ids: Any, **others: Any) -> bool:
    """Whether all are matrices of one shape on the CPU, or one row for all, and the ids are there."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.numel() == 0:
        return False
    shapes = (input_ids.shape, (1, input_ids.shape[1]))
    given = [input_ids, *(x for x in others.values() if x is not None)]
    return all(isinstance(x, Tensor) and x.is_cpu and x.shape in shapes for x in given)


def _alike(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The matrices, each of the shape of the ids."""
    return {name: None if x is None else x.expand_as(inputs["input_ids"]) for name, x in inputs.items()}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The tokens of a padded batch that are computed."""

    batch: PackedBatch
    places: Tensor | None
    """Where they are in the flattened padded batch, int64 (T); None: everywhere."""
    attended: Tensor | None
    """Which of them are attended to, bool (T); None: all."""
    length: int
    """Padded: L."""

    @classmethod
    def of(cls, call: Call, positions_BL: Tensor, parts: EncoderParts, *, every_position: bool) -> Rows | None:
        """The tokens where the mask is 1, and what is wanted besides; None if a sequence has none of the former.

        Wanted is the first column, which heads and poolers read even where it is masked (padding on the left).

        None, too, where attention counts tokens and some are left out before others; or looks at a window, in which a
        masked token may see none.

        Args:
            call: With the ids and the mask.
            positions_BL: What `positions_of` gives.
            parts: Of the encoder.
            every_position: Whether all masked tokens are wanted too.
        """
        kept_BL = None if call.attention_mask is None else call.attention_mask.bool()
        if kept_BL is None or kept_BL.all():
            return cls._among(call, positions_BL, torch.ones_like(call.input_ids, dtype=torch.bool), None)
        if not kept_BL.any(dim=1).all():
            return None
        if parts.counts_tokens and bool((kept_BL[:, 1:] & ~kept_BL[:, :-1]).any()):
            return None
        if every_position and parts.has_windows:
            return None
        wanted_BL = kept_BL.clone()
        wanted_BL[:, slice(None) if every_position else 0] = True
        attended_T = kept_BL[wanted_BL]
        return cls._among(call, positions_BL, wanted_BL, None if attended_T.all() else attended_T)

    @classmethod
    def _among(cls, call: Call, positions_BL: Tensor, wanted_BL: Tensor, attended_T: Tensor | None) -> Rows:
        types_BL = call.token_type_ids
        batch = PackedBatch(
            token_ids=call.input_ids[wanted_BL].long(),
            type_ids=None if types_BL is None else types_BL[wanted_BL].long(),
            position_ids=positions_BL[wanted_BL],
            lengths=tuple(wanted_BL.sum(dim=1).tolist()),
            labels=None,
            example_ids=torch.arange(len(wanted_BL)),
        )
        places = None if batch.num_tokens == wanted_BL.numel() else wanted_BL.flatten().nonzero().squeeze(1)
        return cls(batch=batch, places=places, attended=attended_T, length=wanted_BL.shape[1])

    @property
    def token_keys(self) -> Tensor:
        """Row keys of dropout, int64 (T): a token's example is its row, its position is its column."""
        places_T = torch.arange(self.batch.num_tokens) if self.places is None else self.places
        return row_keys(places_T // self.length, places_T % self.length)

    def padded(self, x_TD: Tensor) -> Tensor:
        """The tokens in their places, zeros elsewhere (B, L, D)."""
        if self.places is not None:
            x_TD = x_TD.new_zeros(len(self.batch) * self.length, x_TD.shape[1]).index_copy(0, self.places, x_TD)
        x_BLD: Tensor = x_TD.unflatten(0, (len(self.batch), self.length))
        return x_BLD


def positions_of(call: Call, family: Family, parts: EncoderParts) -> Tensor:
    """The position of every token as the model's own forward numbers them, less what `FlatEncoder` adds (B, L)."""
    ids_BL = call.input_ids
    if call.position_ids is not None:
        return call.position_ids.long() - parts.position_offset
    if not family.positions_follow_padding:
        return torch.arange(ids_BL.shape[1]).expand_as(ids_BL)
    is_token_BL = ids_BL.ne(parts.position_offset - 1)  # the padding token's id
    return is_token_BL.cumsum(dim=1) * is_token_BL - 1
