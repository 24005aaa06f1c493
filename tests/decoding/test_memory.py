"""Memory above the target alone: the drafter's weights, its context keys and values, the captured rows; nothing twice.

Catches: a second copy of embedding or head, hidden states of every layer kept, whole prompts' hidden states kept
after they were projected, block keys that pile up.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark import DSparkDrafter
from dspark.context_cache import ContextCache
from dspark.decoding.context import extend_context
from dspark.decoding.state import DecodingRun
from dspark.scheduling import VerifyPolicy
from dspark.speculation import SpeculationConfig
from tests.decoding import pair
from tests.scripted import Oracle, drafter_config

VOCAB, WIDTH, PROMPT = 20_000, 64, 600


def tensor_bytes() -> int:
    """Bytes of all distinct storages alive."""
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_nothing_of_the_target_is_copied(target: LlamaForCausalLM) -> None:
    before = tensor_bytes()
    drafter = DSparkDrafter(drafter_config(target)).eval()
    weights = sum(t.nbytes for t in [*drafter.parameters(), *drafter.buffers()])
    assert weights < VOCAB * WIDTH * 4  # smaller than one embedding: neither embedding nor head is in it
    drafter.share_with(target)
    assert tensor_bytes() - before <= weights + 4096
    assert drafter._shared.embedding.weight is target.get_input_embeddings().weight
    assert drafter._shared.lm_head.weight is target.get_output_embeddings().weight


def test_peak_inside_a_round_is_weights_context_and_captured_rows(target: LlamaForCausalLM) -> None:
    drafter = DSparkDrafter(drafter_config(target, target_layer_ids=[1, 5])).eval()
    config = drafter.config
    ids = torch.randint(VOCAB, (1, PROMPT))
    peaks: list[int] = []

    def measure(kwargs: dict) -> None:
        # At the start of each verification pass, when a round holds the most.
        def hook(module, args, call) -> None:
            if call["input_ids"] is not None and call["input_ids"].shape[1] < PROMPT:
                peaks.append(tensor_bytes())

        handle = target.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            target.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None, **kwargs)
        finally:
            handle.remove()

    measure({})
    plain = max(peaks)
    peaks.clear()
    measure({"assistant_model": drafter})
    slots = PROMPT + 12 + 256  # context slots and the growth the cache reserves
    context = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * slots * 4
    captured = (config.block_size + 1) * config.context_width * 4
    logits = 3 * config.block_size * VOCAB * 4  # base logits and the corrected ones of the walk
    target_kv = 2 * 12 * 2 * 16 * config.block_size * 4
    assert max(peaks) - plain <= 1.05 * (context + captured + logits + target_kv) + 65536


@pytest.mark.parametrize(("window", "columns"), [(None, 4 * PROMPT), (64, 64)])
def test_a_prompt_in_chunks_leaves_keys_and_values_only(target: Any, window: int | None, columns: int) -> None:
    """Before the last chunk there is the context cache above plain decoding, neither states nor features."""
    drafter = DSparkDrafter(drafter_config(target, target_layer_ids=[1, 5, 7], num_hidden_layers=1)).eval()
    config, chunk = drafter.config, PROMPT // 2  # features are twice as wide as keys and values
    ids = torch.randint(VOCAB, (1, 4 * PROMPT))

    def before_last_chunk(**kwargs: Any) -> int:
        found: list[int] = []

        def hook(module: Any, args: Any, call: dict[str, Any]) -> None:
            if call["input_ids"].shape[1] == chunk:
                found.append(tensor_bytes())

        handle = target.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            target.generate(ids, do_sample=False, max_new_tokens=1, prefill_chunk_size=chunk, **kwargs)
        finally:
            handle.remove()
        assert len(found) == 8
        return found[-1]

    plain = before_last_chunk()
    slots = columns + 256
    context = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * slots * 4
    assert before_last_chunk(assistant_model=drafter, context_window=window) - plain <= context + 65536


def test_a_prompt_in_one_pass_is_projected_slice_by_slice(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DSparkDrafter(drafter_config(target, target_layer_ids=[1, 5])).eval()
    project, sizes, held = drafter.project_context, [], []

    def watched(states: torch.Tensor) -> torch.Tensor:
        sizes.append(states.shape[1])
        held.append(tensor_bytes())
        return project(states)

    monkeypatch.setattr(drafter, "project_context", watched)
    ids = torch.randint(VOCAB, (1, 4 * 1024 + 100))
    target.generate(ids, do_sample=False, max_new_tokens=1, assistant_model=drafter)
    assert sizes == [1024] * 4 + [100]
    assert max(held[1:]) - min(held[1:]) <= 4096  # the buffers are there from the first slice on


def test_last_call_leaves_only_statistics(target: LlamaForCausalLM) -> None:
    drafter = DSparkDrafter(drafter_config(target)).eval()
    ids = torch.randint(VOCAB, (1, 50))
    target.generate(ids, do_sample=False, max_new_tokens=4, assistant_model=drafter)
    before = tensor_bytes()
    for _ in range(3):
        target.generate(ids, do_sample=False, max_new_tokens=40, assistant_model=drafter)
    assert tensor_bytes() - before <= 65536


def test_states_of_rounds_without_drafts_wait_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds 3 to 302 draft nothing: their states wait for the next draft, in bounded number and in their order."""
    waiting: list[int] = []
    last: list[ContextCache] = []
    contexts: list[ContextCache] = []

    class Idle(VerifyPolicy):
        rounds = 0

        def slots(self, rows: int, most: int, remaining: object = None) -> int:
            self.rounds += 1
            return 0 if 3 <= self.rounds <= 302 else most

    def spy(run: DecodingRun) -> None:
        waiting.append(len(run.pending))
        extend_context(run)
        assert run.context is not None
        last[:] = [run.context]

    target = pair.target()
    ids, mask = torch.randint(1, pair.VOCAB, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 310}
    plain = target.generate(ids, **call)
    texts = [row[skipped:].tolist() for row, skipped in zip(plain, (4, 0), strict=True)]
    monkeypatch.setattr(SpeculationConfig, "new_policy", lambda _: Idle())
    monkeypatch.setattr("dspark.decoding.loop.extend_context", spy)
    for most in (1, 128):
        monkeypatch.setattr("dspark.decoding.loop._MOST_PENDING", most)
        waiting.clear()
        drafter = Oracle(target, texts, [[0, 3], [2, 1]]).eval()
        torch.manual_seed(0)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **call), plain)
        assert max(waiting) == most
        contexts.append(last[0])
    each, late = contexts
    assert each.lengths == late.lengths
    for one, other in zip(each.keys + each.values, late.keys + late.values, strict=True):
        assert one is not None
        assert other is not None
        for b, length in enumerate(each.lengths):
            torch.testing.assert_close(other[b, :, :length], one[b, :, :length])
