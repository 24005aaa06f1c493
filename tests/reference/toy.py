"""A toy target and drafter over three tokens, in exact fractions, and length rules for them."""

from __future__ import annotations

from fractions import Fraction as F

from . import law


def target(text):
    """Depends on the last two tokens; some probabilities are 0."""
    rows = {None: (3, 2, 1), 0: (1, 0, 5), 1: (2, 2, 2), 2: (0, 1, 5)}
    one, two = (rows[t] for t in ((None, None, *text)[-1], (None, None, *text)[-2]))
    return [F(a + b, 12) for a, b in zip(one, two, strict=True)]


def draft(text, drafted):
    """Depends on where the block began, as the real one does, and on the previous token."""
    rows = {0: (4, 1, 1), 1: (1, 3, 2), 2: (2, 2, 2)}
    a, b = rows[len(text) % 3], rows[(0, *text, *drafted)[-1]]
    return [F(x + y, 12) for x, y in zip(a, b, strict=True)]


def top_two(text, drafted):
    weights = draft(text, drafted)
    kept = sorted(weights)[1]
    cut = [w if w >= kept else F(0) for w in weights]
    return [w / sum(cut) for w in cut]


def never(text, drafted):
    return False


def hopeful(text, drafted):
    """A confidence that may read the tokens before the slot."""
    return sum((*text, *drafted)) % 3 != 2


def retrospective(text, block):
    """Looks at the drawn token itself: drops what the target likes less."""
    return next((k for k, x in enumerate(block) if target(text + block[:k])[x] < F(1, 4)), len(block))


def without_token_one(text, drafted):
    """A drafter of a reduced vocabulary, tokens 0 and 2."""
    a, _, c = draft(text, drafted)
    return [a / (a + c), F(0), c / (a + c)]


greedy = law.argmax_of(draft)
LOSSLESS_RULES = {"full": law.full_length, "none": law.stepwise(never), "stepwise": law.stepwise(hopeful)}
