"""Where the target has no law for the next token, sampling fails as it does without a drafter, whatever was drafted.

Catches: an arbitrary token in the text where plain decoding raises.
"""

from __future__ import annotations

import pytest
import torch

from .tiny import drafter, target


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_forbidden(rows):
    """Of five tokens four may follow the prompt; the fifth new one has no law."""
    model = target(5)
    kwargs = {"do_sample": True, "no_repeat_ngram_size": 1, "num_return_sequences": rows}
    ids = torch.tensor([[1]])
    assistant = drafter(model, block_size=3)
    text = model.generate(ids, assistant_model=assistant, max_new_tokens=4, **kwargs)
    assert text.sort(dim=-1).values.tolist() == [[0, 1, 2, 3, 4]] * rows
    for call in ({}, {"assistant_model": assistant}):
        with pytest.raises(RuntimeError, match=r"has no law|probability tensor contains"):
            model.generate(ids, max_new_tokens=12, **kwargs, **call)


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_of_nan(rows):
    model = target.__wrapped__(5)

    def spoil(module, args, kwargs, outputs):
        if kwargs["input_ids"].shape[1] != 4:  # all passes but the prompt's
            outputs.logits = outputs.logits * torch.nan
        return outputs

    model.register_forward_hook(spoil, with_kwargs=True)
    kwargs = {"do_sample": True, "num_return_sequences": rows, "max_new_tokens": 8}
    for call in ({}, {"assistant_model": drafter(model)}):
        with pytest.raises(RuntimeError, match=r"has no law|probability tensor contains"):
            model.generate(torch.tensor([[1, 2, 2, 1]]), **kwargs, **call)
