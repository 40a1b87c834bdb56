"""Any other Hugging Face model, through its own forward: the batch is padded on entry to the longest sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fleetune.data.batches import PackedBatch
from fleetune.model.heads import HEADS, Head


class PaddedClassifier(nn.Module):
    """A model without a row in the table of families: right, but slower.

    Args:
        model: The model; its parameters are shared, not copied.
        pad_token_id: Id that fills the sequences up; the attention mask hides it.
        head: The model's.
    """

    def __init__(self, model: Any, pad_token_id: int, head: Head = HEADS["classification"]) -> None:
        super().__init__()
        self.model = model
        self._head = head
        self._pad_token_id = pad_token_id
        self._dtype = torch.float32
        self._before_stage: Callable[[int], None] = lambda stage: None

    @property
    def fills_with(self) -> int | None:
        """Id of the token that a batch is filled up with."""
        return self._pad_token_id

    @property
    def stages(self) -> list[list[nn.Parameter]]:
        """All parameters as one stage: what the model's own forward uses first is not known."""
        return [list(self.model.parameters())]

    def before_stage(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called with 0 before every forward."""
        self._before_stage = tell

    @property
    def word_embeddings(self) -> nn.Embedding:
        """The table of the model's words."""
        table: nn.Embedding = self.model.get_input_embeddings()
        return table

    def compute_in(self, dtype: torch.dtype) -> None:
        """Change what the model's products compute in; torch's autocast decides about the rest."""
        self._dtype = dtype

    def begin_micro_batch(self, seed: int, step: int, *, micro_batch: int, rank: int) -> None:
        """Make the random numbers of a micro-batch a function of its place in the run: resuming needs no state."""
        state = np.random.SeedSequence([seed, step, micro_batch, rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]))

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits of every sequence, float32 (B, C), or of every token (T, C)."""
        self._before_stage(0)
        if len(batch) == 0:
            return self._placeholder()
        inputs = {"input_ids": self._padded(batch.token_ids, batch.lengths, self._pad_token_id)}
        inputs["attention_mask"] = self._padded(torch.ones_like(batch.token_ids), batch.lengths, 0)
        if batch.type_ids is not None:
            inputs["token_type_ids"] = self._padded(batch.type_ids, batch.lengths, 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            logits = self._head.logits_of(self.model(**inputs))
        if self._head.reads_all_tokens:
            logits = logits[inputs["attention_mask"].bool()]
        return logits.float()

    def _placeholder(self) -> Tensor:
        """No logits, still joined to every parameter: backward gives zeros."""
        logits = self._head.logits_of(self.model(input_ids=torch.zeros(1, 2, dtype=torch.int64)))
        return logits.flatten(0, -2)[:0]

    @staticmethod
    def _padded(values_T: Tensor, lengths: tuple[int, ...], fill: int) -> Tensor:
        return pad_sequence(list(values_T.split(list(lengths))), batch_first=True, padding_value=fill)
