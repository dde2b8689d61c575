"""The next tokens of several texts, from the numbers that a network computed. Only tokens leave the device.

A token is drawn with a number that is known before: the token at which the sum of the probabilities, in the
order of the vocabulary, exceeds it. So rounding, which differs between batches, hardly ever changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from carpool_worker.models.hf.language_model import NOT_A_NUMBER
from carpool_worker.models.hf.order import Draw


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """A token for each row of `logits` (texts, vocabulary); NOT_A_NUMBER for one with NaN in it."""
    logits = logits.float()
    tokens = logits.argmax(-1)
    drawn = [index for index, draw in enumerate(draws) if draw.sampling.temperature]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _drawn(logits[rows], [draws[index] for index in drawn])
    tokens = torch.where(logits.isnan().any(-1), NOT_A_NUMBER, tokens)
    chosen: list[int] = tokens.tolist()  # the only time that the device is waited for
    return chosen


def _drawn(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    samplings = [draw.sampling for draw in draws]
    vocabulary = logits.shape[-1]
    given = torch.tensor(
        [
            [one.temperature for one in samplings],
            [one.top_p for one in samplings],
            [draw.number for draw in draws],
        ],
        dtype=torch.float64,
        device=logits.device,
    )[:, :, None]
    temperature, top_p, number = given
    # The largest is subtracted before, because a low temperature makes large numbers infinite.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.float()
    probabilities = torch.softmax(scaled, -1)
    if any(one.top_k for one in samplings):
        ranks = [min(one.top_k or vocabulary, vocabulary) for one in samplings]
        probabilities = _likeliest(probabilities, ranks)
    if any(one.top_p < 1 for one in samplings):
        probabilities = _nucleus(probabilities, top_p)
    sums = probabilities.double().cumsum(-1)
    chosen = (sums <= number * sums[:, -1:]).sum(-1)
    return chosen.clamp(max=vocabulary - 1)


def _likeliest(probabilities: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """The probabilities of the `top_k` likeliest tokens of each row, ties included; others are zero."""
    best = probabilities.topk(max(ranks), -1).values
    last = torch.tensor(ranks, device=probabilities.device)[:, None] - 1
    return torch.where(probabilities >= best.gather(-1, last), probabilities, 0)


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zero for all but the likeliest that have this share together, and those as likely as the last one."""
    best = probabilities.sort(-1, descending=True).values
    sums = best.double().cumsum(-1)
    kept = (sums - best < top_p * sums[:, -1:]).sum(-1, keepdim=True).clamp(min=1)
    return torch.where(probabilities >= best.gather(-1, kept - 1), probabilities, 0)
