"""Three consecutive rounds of the reference, tensor by tensor.

Catches: wrong layer offset, wrong positions, block keys kept in the cache, a head that restarts or sees the wrong
token, a soft cap in the wrong place, the confidence head's inputs.
"""

from __future__ import annotations

import pytest
import torch

from dspark.context_cache import ContextCache

from . import common

CASES = common.cases("vectors")


@pytest.mark.parametrize(("name", "index"), CASES)
def test_rounds_match_the_reference(name: str, index: int) -> None:
    meta = common.read("vectors", name)
    case, tol = meta["cases"][index], {"atol": 2e-4, "rtol": 2e-4}
    t = common.tensors("vectors", case["file"])
    model = common.drafter(name)
    cache = ContextCache(len(model.layers), [0])
    shared = model.shared_modules(None)
    for info in case["rounds"]:
        r = f"r{info['round']}."
        assert cache.lengths == [info["draft_cache_len_before"]]
        with torch.no_grad():
            features = model.project_context(t[r + "context_feature"])
            torch.testing.assert_close(features, t[r + "context_projected"], **tol)
            model.extend_context(cache, features)
            assert cache.lengths == [info["start"]]
            anchor = t[r + "draft_input_ids"][:, 0]
            block = model.draft_block(anchor, cache, shared)
            walk = model.walk_block(block, anchor, lambda k, logits, _: logits.argmax(-1))
            confidence = model.confidence_logits(block.hidden, walk.previous_ids)
        for layer in range(len(model.layers)):
            for kind, store in (("k", cache.keys), ("v", cache.values)):
                torch.testing.assert_close(
                    store[layer][:, :, : info["start"]], t[f"{r}draft_cache_{kind}{layer}"], **tol
                )
        torch.testing.assert_close(block.hidden, t[r + "block_hidden"], **tol)
        torch.testing.assert_close(block.base_logits, t[r + "base_logits"], **tol)
        torch.testing.assert_close(walk.logits, t[r + "corrected_logits"], **tol)
        assert torch.equal(walk.token_ids, t[r + "sampled_tokens"])
        assert (confidence is None) == (r + "confidence_logits" not in t)
        if confidence is not None:
            torch.testing.assert_close(confidence, t[r + "confidence_logits"], **tol)


@pytest.mark.parametrize("name", common.names("vectors"))
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_stateless_draft_equals_the_first_round(name: str, attn: str) -> None:
    meta = common.read("vectors", name)
    t = common.tensors("vectors", meta["cases"][0]["file"])
    model = common.drafter(name, attn_implementation=attn)
    out = model.draft(t["r1.draft_input_ids"][:, 0], t["r1.context_feature"])
    assert torch.equal(out.token_ids, t["r1.sampled_tokens"])
    torch.testing.assert_close(out.logits, t["r1.corrected_logits"], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(out.context_features, t["r1.context_projected"], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", common.names("vectors"))
def test_sampled_draft_follows_its_generator(name: str) -> None:
    t = common.tensors("vectors", common.read("vectors", name)["cases"][0]["file"])
    model = common.drafter(name)
    args = (t["r1.draft_input_ids"][:, 0], t["r1.context_feature"])
    draws = [
        model.draft(*args, do_sample=True, generator=torch.Generator().manual_seed(s)).token_ids
        for s in (1, 1, 2, 3, 4)
    ]
    assert torch.equal(draws[0], draws[1])
    assert any(not torch.equal(draws[0], d) for d in draws[2:])
