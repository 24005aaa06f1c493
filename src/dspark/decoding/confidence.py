"""Step 4: how far the block is expected to survive.

`c_k = sigmoid(logit_k / T_k)` is the chance that slot k is accepted given that all before it are; survival
`a_k = prod_{i<=k} c_i` never increases. The score of slot k sees tokens before k only.
"""

from __future__ import annotations

from transformers.utils import logging

from ..modeling_dspark import DraftBlock
from ..ops.confidence import ConfidenceScores as Confidence
from ..ops.confidence import confidence_scores, scores_of_logits
from .op_weights import confidence_weights
from .state import DecodingRun, Proposal

logger = logging.get_logger(__name__)

_NO_HEAD = {
    "threshold": "the drafter has no confidence head, so every draft is verified whatever the confidence thresholds",
    "others": "the drafter has no confidence head, so drafts are scheduled by how recent rounds went",
}


def estimate_confidence(run: DecodingRun, block: DraftBlock, proposal: Proposal) -> Confidence | None:
    """Scores of every slot, or None when no rule of this call looks at them or the drafter has no confidence head."""
    is_needed = run.settings.record_confidence or run.policy.needs_confidence
    if not (is_needed or run.settings.record_trace):
        return None
    temperatures = run.confidence_temperatures
    with run.stats.forward("drafter"):
        weights = confidence_weights(run.drafter, block)
        if weights is not None:
            return confidence_scores(block.hidden, proposal.previous_ids, weights, temperatures=temperatures)
        logits = run.drafter.confidence_logits(block.hidden, proposal.previous_ids)
    if logits is None and not is_needed:
        return None
    if logits is None:
        reason = _NO_HEAD.get(run.settings.policy, _NO_HEAD["others"])
        run.stats.fall_back(reason)
        logger.warning_once(f"dspark: {reason}. Output is unchanged.")
        return None
    return scores_of_logits(logits, temperatures)


__all__ = ["Confidence", "estimate_confidence"]
