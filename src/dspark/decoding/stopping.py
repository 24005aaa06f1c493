"""Stop rules, position by position: a block ends where plain decoding would have ended (step 7).

transformers' criteria look at the last token only, so a block is checked prefix by prefix. EOS and the length limit
are known to be functions of position and token and are answered without a call.
"""

from __future__ import annotations

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class StopRules:
    """The stopping criteria of one `generate` call.

    Args:
        criteria: The list `generate` prepared.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        # Exact types only: a subclass may decide otherwise and is asked like any other criterion.
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        eos = [c for c in criteria if type(c) is EosTokenCriteria]
        self.eos_ids = {int(i) for c in eos for i in torch.as_tensor(c.eos_token_id).flatten().tolist()}
        self._others = StoppingCriteriaList(
            [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        )
        self._pads_finished_rows = any(hasattr(c, "eos_token_id") for c in criteria)  # as plain decoding finds out

    def check_batch(self, batch_size: int) -> None:
        """Refuse batches whose rows may stop apart without a rule for what follows in the ones that stop early.

        Raises:
            ValueError: Names the criteria and the way out.
        """
        if batch_size > 1 and self._others and not self._pads_finished_rows:
            names = ", ".join(sorted({type(criterion).__name__ for criterion in self._others}))
            raise ValueError(
                f"{names} may stop the {batch_size} rows of the batch at different lengths, and without an "
                "`eos_token_id` plain decoding goes on writing behind a row's end until all rows have stopped, which "
                "a drafter does not do. Set `eos_token_id` and `pad_token_id`, or generate row by row."
            )

    def first_eos(self, tokens: list[int]) -> int | None:
        """Index of the first end-of-sequence token in `tokens`, or None."""
        return next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)

    def budget(self, length: int) -> int | None:
        """Tokens a row of `length` tokens may still get, or None without a limit."""
        return None if self.max_length is None else max(self.max_length - length, 0)

    def stops_at(self, row_ids: torch.Tensor, length: int, scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Whether a row stops when its text is `row_ids[:, :length]`.

        Args:
            row_ids: int64 `[1, n]` with `n >= length`.
            length: Tokens that count.
            scores: What plain decoding would hand to the criteria.
        """
        if self.max_length is not None and length >= self.max_length:
            # Asked all the same: a criterion may count the tokens it saw.
            self._ask(row_ids, length, scores)
            return True
        if self._ask(row_ids, length, scores):
            return True
        return bool(self.eos_ids) and int(row_ids[0, length - 1]) in self.eos_ids

    def _ask(self, row_ids: torch.Tensor, length: int, scores: tuple[torch.Tensor, ...] | None) -> bool:
        return bool(self._others) and bool(self._others(row_ids[:, :length], scores).all())


__all__ = ["StopRules"]
