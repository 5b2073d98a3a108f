"""Completions of many lengths, laid out as tensors for one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

__all__ = ("PaddedRows", "Row", "pad", "padded_batches")

# Bounds the logits of one forward pass to 256 MB of float32, whatever the vocabulary.
_MAX_LOGITS = 64 * 1024 * 1024


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to learn from.

    Attributes:
        token_ids: Prompt and completion.
        prompt_length: How many of these are the prompt.
        logprobs: The engine's logprob of each completion token.
        advantage: What every token of the completion is credited with.
    """

    token_ids: Sequence[int]
    prompt_length: int
    logprobs: Sequence[float]
    advantage: float

    def __len__(self) -> int:
        return len(self.token_ids)


class PaddedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Rows padded on the right, which needs no position ids: a causal model's real tokens never see what follows them.

    Attributes:
        input_ids: Prompts and completions, one a row.
        attention_mask: 1 where a row has a token.
        first: Column where the shortest prompt's completion begins. The tensors below leave out the columns before it.
        mask: True where a row has a token of its completion.
        targets: The tokens.
        behaviour: The engine's logprobs of them; 0 where ``mask`` is False.
        advantages: One a row, as a column.
    """

    input_ids: Tensor
    attention_mask: Tensor
    first: int
    mask: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor


def padded_batches(rows: Sequence[Row], *, tokens_per_batch: int, vocabulary: int) -> Iterator[PaddedRows]:
    """Cut rows, longest first so that little is padding, into batches of bounded size; one row always fits."""
    ordered = sorted(rows, key=len, reverse=True)
    limit = min(tokens_per_batch, _MAX_LOGITS // vocabulary)
    while ordered:
        count = max(1, limit // len(ordered[0]))
        yield pad(ordered[:count])
        ordered = ordered[count:]


def pad(rows: Sequence[Row]) -> PaddedRows:
    """Lay rows out as one batch."""
    shape = (len(rows), max(len(row) for row in rows))
    first = min(row.prompt_length for row in rows)
    input_ids = torch.zeros(shape, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    behaviour = torch.zeros(shape)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = torch.tensor(row.token_ids)
        attention_mask[index, : len(row)] = 1
        mask[index, row.prompt_length : len(row)] = True
        behaviour[index, row.prompt_length : len(row)] = torch.tensor(row.logprobs)
    return PaddedRows(
        input_ids=input_ids,
        attention_mask=attention_mask,
        first=first,
        mask=mask[:, first:],
        targets=input_ids[:, first:],
        behaviour=behaviour[:, first:],
        advantages=torch.tensor([row.advantage for row in rows]).unsqueeze(-1),
    )
