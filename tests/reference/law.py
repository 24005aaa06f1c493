"""The whole law of a speculatively decoded text, by enumeration over a tiny vocabulary: no sampling, no tolerance.

Laws of tokens are functions, texts are tuples of ids, a law of texts is a dict. With `Fraction`s everything is exact.
The interface, by example (a uniform target, a drafter that prefers token 0, everything verified, three tokens)::

    target = lambda text: [Fraction(1, 2)] * 2
    draft = lambda text, drafted: [Fraction(3, 4), Fraction(1, 4)]
    assert committed_law(target, draft, full_length, 3, block_size=2) == target_law(target, 3)

`total_variation` measures how far a wrong rule is off: the controls below must be far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeAlias

from .rejection import Law, Number, positive_part

Text: TypeAlias = tuple[int, ...]
TextLaw: TypeAlias = dict[Text, Number]
# Committed text -> law of the next token.
TargetLaw: TypeAlias = Callable[[Text], Law]
# Committed text, drafts of this block so far -> law of the next draft.
DraftLaw: TypeAlias = Callable[[Text, Text], Law]
# Committed text, the whole drafted block -> drafts verified. Lossless only if slot k's fate ignores drafts from k on.
LengthRule: TypeAlias = Callable[[Text, Text], int]
# Drafts to verify, the K laws they are said to come from, K + 1 target laws -> law of the tokens committed.
Verify: TypeAlias = Callable[[Text, Sequence[Law], Sequence[Law]], TextLaw]


def full_length(text: Text, block: Text) -> int:
    """Length rule: verify the whole block."""
    return len(block)


def stepwise(admits: Callable[[Text, Text], bool]) -> LengthRule:
    """A lossless length rule: `admits(text, drafts before the slot)` decides slot by slot and sees no later draft."""

    def rule(text: Text, block: Text) -> int:
        length = 0
        while length < len(block) and admits(text, block[:length]):
            length += 1
        return length

    return rule


def ratio(target_prob: Number, draft_prob: Number) -> Number:
    """Probability that a drawn token stays (see `rejection.accepts` for a draft law that denies the token)."""
    return min(1, target_prob / draft_prob) if draft_prob else int(target_prob > 0)


def normalised(target: Law, draft: Law) -> list[Number]:
    """Law of the token after a refusal."""
    residual = positive_part(target, draft)
    return [weight / sum(residual) for weight in residual]


def verifier(
    accept: Callable[[Number, Number], Number] = ratio, recover: Callable[[Law, Law], Law] = normalised
) -> Verify:
    """Accept/reject with a pluggable ratio and residual; the defaults are the exact rule."""

    def verify(drafts: Text, draft_laws: Sequence[Law], target_laws: Sequence[Law]) -> TextLaw:
        law: TextLaw = defaultdict(int)
        reached: Number = 1
        for k, token in enumerate(drafts):
            stays = accept(target_laws[k][token], draft_laws[k][token])
            if stays < 1:
                for recovered, mass in enumerate(recover(target_laws[k], draft_laws[k])):
                    law[(*drafts[:k], recovered)] += reached * (1 - stays) * mass
            reached *= stays
        for bonus, mass in enumerate(target_laws[len(drafts)]):
            law[(*drafts, bonus)] += reached * mass
        return law

    return verify


EXACT = verifier()


def committed_law(
    target: TargetLaw,
    draft: DraftLaw,
    length_rule: LengthRule,
    horizon: int,
    *,
    block_size: int,
    claimed: DraftLaw | None = None,
    verify: Verify = EXACT,
) -> TextLaw:
    """Law of the first `horizon` tokens that rounds of drafting and verifying commit.

    Args:
        target: Law of the next token.
        draft: Law the drafts are drawn from.
        length_rule: Drafts verified per block.
        horizon: Tokens of text, at least 1.
        block_size: Drafts per round, 0 or more.
        claimed: Law the verifier is told the drafts came from; None: the true one.
        verify: One round's verdict as a law.
    """
    finished: TextLaw = defaultdict(int)
    open_texts: TextLaw = {(): 1}
    while open_texts:
        text = min(open_texts, key=len)  # the shortest: rounds lengthen texts, so no more mass will reach it
        mass = open_texts.pop(text)
        for tokens, share in round_law(target, draft, length_rule, text, block_size, claimed, verify).items():
            longer = (text + tokens)[:horizon]
            pool = finished if len(longer) == horizon else open_texts
            pool[longer] = pool.get(longer, 0) + mass * share
    return dict(finished)


def round_law(
    target: TargetLaw,
    draft: DraftLaw,
    length_rule: LengthRule,
    text: Text,
    block_size: int,
    claimed: DraftLaw | None = None,
    verify: Verify = EXACT,
) -> TextLaw:
    """Law of the tokens one round commits after `text` (arguments as `committed_law`)."""
    claimed = claimed or draft
    law: TextLaw = defaultdict(int)
    for block, chance in _blocks(draft, text, block_size).items():
        drafts = block[: length_rule(text, block)]
        told = [claimed(text, drafts[:k]) for k in range(len(drafts))]
        targets = [target(text + drafts[:k]) for k in range(len(drafts) + 1)]
        for tokens, share in verify(drafts, told, targets).items():
            if share:
                law[tokens] += chance * share
    return dict(law)


def target_law(target: TargetLaw, horizon: int) -> TextLaw:
    """Law of the first `horizon` tokens of plain sampling."""
    law: TextLaw = {(): 1}
    for _ in range(horizon):
        law = {(*text, token): mass * p for text, mass in law.items() for token, p in enumerate(target(text)) if p}
    return law


def total_variation(a: TextLaw, b: TextLaw) -> Number:
    """Half the L1 distance of two laws of texts, in [0, 1]."""
    return sum(abs(a.get(text, 0) - b.get(text, 0)) for text in {*a, *b}) / 2


def _blocks(draft: DraftLaw, text: Text, block_size: int) -> TextLaw:
    return target_law(lambda drafted: draft(text, drafted), block_size)


# Deliberately wrong rules. Each must be caught by the same check that the right one passes.


def unnormalised_recover(target: Law, draft: Law) -> list[Number]:
    """Forgets to normalise the residual: an inverse-CDF draw then leaves the missing mass on the last token."""
    residual = [max(p - q, 0) for p, q in zip(target, draft, strict=True)]
    return [*residual[:-1], 1 - sum(residual[:-1])]


def target_recover(target: Law, draft: Law) -> list[Number]:
    """Draws from the target's law, instead of the residual, after a refusal."""
    return list(target)


def on_grid(steps: int, *, inclusive: bool) -> Callable[[Number, Number], Number]:
    """Accept by uniforms 0, 1/steps, .. (steps-1)/steps: `u < ratio`, or the wrong `u <= ratio`.

    The strict form is exact where every ratio is a multiple of `1/steps`; the other takes tokens of probability 0.
    """

    def accept(target_prob: Number, draft_prob: Number) -> Number:
        hits = sum(
            (u * draft_prob <= target_prob * steps) if inclusive else (u * draft_prob < target_prob * steps)
            for u in range(steps)
        )
        return Fraction(hits, steps)

    return accept


def argmax_of(draft: DraftLaw) -> DraftLaw:
    """The greedy drafter of a drafter: one-hot at the (first) most likely token."""

    def greedy(text: Text, drafted: Text) -> list[Number]:
        law = draft(text, drafted)
        return [int(i == max(range(len(law)), key=law.__getitem__)) for i in range(len(law))]

    return greedy
