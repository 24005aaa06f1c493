"""New drafters: sizes that follow the target, the warm start, ids for masks and reduced vocabularies.

Catches: a fold that changes the layer, a warm start of layers built otherwise, heads whose rows belong to other ids,
a padding token that is the end-of-sequence token as mask.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Qwen2Config, Qwen2ForCausalLM

from dspark import DSparkDrafter
from dspark.training import choose_mask_token, default_target_layer_ids, draft_vocab_from_counts, new_drafter
from dspark.training.warm_start import copy_layer
from dspark.training_forward import PlainContext

from . import tiny


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]), (30, 5, [1, 8, 14, 20, 27]), (6, 5, [1, 2, 3]), (6, 1, [3]), (4, 5, [1]),
        (2, 3, [0]), (1, 2, [-1]),
    ],
)  # fmt: skip
def test_taps_are_evenly_spaced(layers, taps, expected) -> None:
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize(("make", "family"), [(tiny.llama, "llama"), (tiny.qwen3, "qwen3")])
@pytest.mark.parametrize("init", ["target", "random"])
def test_sizes_follow_the_target(make, family, init, tmp_path) -> None:
    target = make(rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-4)
    drafter = tiny.drafter_for(target, init=init)
    config = drafter.config
    assert (config.family, config.hidden_size, config.head_dim, config.vocab_size) == (family, 32, 8, tiny.VOCAB)
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (5000.0, 1e-4)
    assert config.target["model_type"] == family
    drafter.save_pretrained(tmp_path)
    again = DSparkDrafter.from_pretrained(tmp_path)
    assert drafter.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen3])
def test_folded_layer_is_the_targets_layer(make) -> None:
    """Same hidden state at the last position, same keys before it: context features stand for earlier positions."""
    target = make()
    source = target.model.layers[-1]
    source.input_layernorm.weight.data.uniform_(0.5, 1.5)
    drafter = tiny.drafter_for(target, num_hidden_layers=1)
    layer = drafter.layers[0]
    copy_layer(layer, source)
    hidden = torch.randn(1, 7, 32)
    positions = torch.arange(7)[None]
    with torch.no_grad():
        rotary = target.model.rotary_emb(hidden, positions)
        expected = source(hidden, position_embeddings=rotary, position_ids=positions)
        features = drafter.hidden_norm(hidden[:, :6])  # weight 1: the plain normalisation the fold expects
        context = PlainContext([layer], features, drafter.rotary_emb(hidden, positions[:, :6]))
        rotary = drafter.rotary_emb(hidden, positions[:, 6:])
        ours = layer(hidden[:, 6:], rotary, context, None)
    expected = expected if torch.is_tensor(expected) else expected[0]
    torch.testing.assert_close(ours[0, 0], expected[0, 6], rtol=1e-5, atol=1e-5)


def test_warm_start_fills_every_part() -> None:
    target = tiny.qwen3()
    drafter = tiny.drafter_for(target)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    assert (drafter.hidden_norm.weight == 1).all()
    assert (drafter.layers[0].input_layernorm.weight == 1).all()
    assert torch.equal(drafter.layers[1].mlp.up_proj.weight, target.model.layers[5].mlp.up_proj.weight)
    # A context feature is the deepest tap, up to noise.
    taps = torch.randn(50, drafter.config.context_width)
    similar = torch.nn.functional.cosine_similarity(drafter.fc(taps), taps[:, -32:])
    assert similar.min() > 0.99
    # The sequential head starts as no head.
    assert (drafter.markov_head.markov_w2.weight == 0).all()
    assert drafter.markov_head.markov_w1.weight.std() > 0


def test_warm_start_helps_on_a_trained_target(tmp_path) -> None:
    """A target that has learnt to count: the drafter that starts from its layers learns the same text faster."""
    target = tiny.llama(num_hidden_layers=4)
    text = 3 + (torch.randint(60, (32, 1)) + torch.arange(16)) % 60
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
    for _ in range(60):
        loss = target(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0
    data = [{"input_ids": row, "loss_mask": torch.arange(16) > 3} for row in text]
    tau = {}
    for init in ("target", "random"):
        drafter = tiny.drafter_for(target, init=init)
        run = tiny.trainer(tmp_path, drafter, target, data, max_steps=15, logging_steps=15, learning_rate=2e-3)
        run.train()
        tau[init] = run.state.log_history[0]["tau"]
    assert tau["target"] > tau["random"]


def test_reduced_head_has_the_rows_of_its_ids() -> None:
    target = tiny.llama()
    drafter = tiny.drafter_for(target, draft_vocab=[2, 5, 40, 90])
    assert drafter.draft_token_ids.tolist() == [2, 5, 40, 90]
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[[2, 5, 40, 90]])
    assert drafter.config.target["draft_vocab_hash"]
    for bad in ([], [5, 2], [2, 2], [2, tiny.VOCAB], [-1, 3]):
        with pytest.raises(ValueError, match="draft_vocab"):
            tiny.drafter_for(target, draft_vocab=bad)


def test_attention_bias_follows_the_target() -> None:
    torch.manual_seed(0)
    sizes = {k: v for k, v in tiny.SIZES.items() if k != "head_dim"}
    target = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    target.model.layers[-1].self_attn.k_proj.bias.data.fill_(0.5)
    drafter = tiny.drafter_for(target)
    assert drafter.config.attention_bias
    assert (drafter.layers[-1].self_attn.o_proj.bias == 0).all()
    assert (drafter.layers[-1].self_attn.k_proj.bias == 0.5).all()


def test_gemma4_gets_its_family_and_refuses_a_warm_start() -> None:
    config = Gemma4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, global_head_dim=16, num_global_key_value_heads=2, sliding_window=8,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0,
    )  # fmt: skip
    target = Gemma4ForCausalLM(config).eval()
    drafter = tiny.drafter_for(target, init="random")
    assert (drafter.config.family, drafter.config.head_dim) == ("gemma4", 16)
    assert drafter.config.rope_parameters["rope_type"] == "proportional"
    with pytest.raises(ValueError, match=r"warm start .* 'gemma4'.*init='random'"):
        tiny.drafter_for(target)


def test_impossible_warm_starts_say_why() -> None:
    target = tiny.llama()
    with pytest.raises(ValueError, match="9 layers, the target only 6"):
        tiny.drafter_for(target, num_hidden_layers=9)
    with pytest.raises(ValueError, match=r"differ in self_attn\.k_norm\.weight, self_attn\.q_norm\.weight"):
        tiny.drafter_for(target, family="qwen3")
    with pytest.raises(ValueError, match="`init` must be"):
        tiny.drafter_for(target, init="warm")
    with pytest.raises(ValueError, match="'gemma4' takes the sizes"):
        tiny.drafter_for(target, family="gemma4", init="random")


# --- ids ----------------------------------------------------------------------------------------------------------


class Tokenizer:
    """As much of a tokenizer as the choice of a mask token looks at."""

    def __init__(self, size=tiny.VOCAB, mask=None, special=(), template="{{ '<user>' }}") -> None:
        self.size, self.mask_token_id, self.mask_token, self.chat_template = size, mask, "<mask>", template
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = 1, 2, 2, None
        self.added_tokens_decoder = {
            token_id: SimpleNamespace(content=text, special=is_special) for token_id, text, is_special in special
        }

    def __len__(self) -> int:
        return self.size


def test_mask_token_is_one_that_never_occurs() -> None:
    target = tiny.llama()
    assert choose_mask_token(target, Tokenizer(mask=7)).token_id == 7
    assert choose_mask_token(target, Tokenizer(size=90)).token_id == 90  # first row no token has
    special = [(1, "<s>", True), (2, "</s>", True), (4, "<unused>", True), (9, "<user>", True), (11, "word", False)]
    choice = choose_mask_token(target, Tokenizer(special=special))
    assert choice.token_id == 4
    assert "'<unused>'" in choice.reason
    assert choose_mask_token(target, token_id=5).reason == "given"


def test_mask_token_that_cannot_be_is_refused() -> None:
    target = tiny.llama()
    with pytest.raises(ValueError, match="end-of-sequence id"):
        choose_mask_token(target, Tokenizer(), token_id=2)
    with pytest.raises(ValueError, match="no row in the embedding"):
        choose_mask_token(target, token_id=tiny.VOCAB)
    with pytest.raises(ValueError, match="No token is free"):
        choose_mask_token(target, Tokenizer(special=[(2, "</s>", True), (9, "<user>", True)]))
    with pytest.raises(ValueError, match="no tokenizer"):
        new_drafter(target)
    # The tokenizer's mask token may be the end-of-sequence token by mistake.
    assert choose_mask_token(target, Tokenizer(size=90, mask=2)).token_id == 90


def test_draft_vocabulary_keeps_the_frequent_and_the_needed() -> None:
    counts = torch.tensor([0, 5, 0, 9, 5, 1])
    assert draft_vocab_from_counts(counts, 3, always=[2]) == [1, 2, 3]
    assert draft_vocab_from_counts(counts, 4) == [1, 3, 4, 5]
    for size, always in ((0, []), (7, []), (1, [1, 2]), (3, [6])):
        with pytest.raises(ValueError, match="must"):
            draft_vocab_from_counts(counts, size, always=always)
