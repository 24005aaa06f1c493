"""Adapters while decoding: switched per call, packed, on the drafter and on the target; the text never changes.

Catches: heads left on or off by a switch, drafts of the wrong adapter, a pairing check that does not see which adapter
a target runs with, rows of a batch that lose their adapters.
"""

from __future__ import annotations

import copy

import pytest
import torch

peft = pytest.importorskip("peft")

from dspark import DSparkDrafter, SpeculationConfig, optimize_for_cpu  # noqa: E402
from dspark.pairing import check_pair, fingerprint  # noqa: E402
from dspark.training import FeatureDataset, FeaturesError, write_features  # noqa: E402
from tests.peft.wrapped import KINDS, base_folder, drafts, same_drafts, shaken, state_hash, text  # noqa: E402
from tests.training import tiny  # noqa: E402


@pytest.fixture
def target():
    return tiny.llama()


@pytest.fixture
def folders(tmp_path, target) -> list:
    """Two adapters of one drafter, one with heads and one without, and that drafter."""
    base = base_folder(tmp_path / "base", target)
    without = peft.LoraConfig(r=2, target_modules=["q_proj", "fc"])
    for seed, config in enumerate((KINDS["lora"](), without)):
        model = peft.get_peft_model(DSparkDrafter.from_pretrained(base), config)
        shaken(model, seed=seed).save_pretrained(tmp_path / str(seed))
    return [tmp_path / "0", tmp_path / "1", base]


def alone(folders, target) -> list:
    """Drafts with each adapter loaded by itself, and without one."""
    return [drafts(DSparkDrafter.from_pretrained(folder), target) for folder in folders]


def test_adapters_are_switched_per_call(folders, target) -> None:
    expected, before, plain = alone(folders, target), state_hash(target), text(target)
    drafter = DSparkDrafter.from_pretrained(folders[0], adapter_name="code")
    drafter.load_adapter(folders[1], "chat")
    assert drafter.active_adapters() == ["chat"]
    for name, drafted in (("code", expected[0]), ("chat", expected[1]), ("code", expected[0])):
        drafter.set_adapter(name)
        assert same_drafts(drafts(drafter, target), drafted)
        assert text(target, assistant_model=drafter) == plain
    drafter.disable_adapters()
    assert same_drafts(drafts(drafter, target), expected[2])
    assert text(target, assistant_model=drafter) == plain
    for name, drafted in (("chat", expected[1]), ("code", expected[0])):
        drafter.set_adapter(name)  # chosen while off: what counts when they are on again
        drafter.enable_adapters()
        assert same_drafts(drafts(drafter, target), drafted)
        drafter.disable_adapters()
    drafter.enable_adapters()
    assert not any(parameter.requires_grad for parameter in drafter.parameters())
    assert state_hash(target) == before
    assert text(target) == plain


def test_peft_s_own_switches_work_too(folders, target) -> None:
    expected, plain = alone(folders, target), text(target)
    model = peft.PeftModel.from_pretrained(DSparkDrafter.from_pretrained(folders[2]), folders[0], "code")
    model.load_adapter(folders[1], "chat")
    rounds = {}
    for name, drafted in (("chat", expected[1]), ("code", expected[0])):
        model.set_adapter(name)
        assert same_drafts(drafts(model, target), drafted)
        assert text(target, assistant_model=model) == plain
        assert text(target, custom_generate=model.decode) == plain
        rounds[name] = model.last_stats.accepted
    with model.disable_adapter():
        assert same_drafts(drafts(model, target), expected[2])
        assert text(target, assistant_model=model) == plain
    assert same_drafts(drafts(model, target), expected[0])
    assert rounds["chat"] != rounds["code"]


def test_sampling_is_the_same_with_every_adapter(folders, target) -> None:
    """The law is the target's whatever the drafts: the share of the likeliest first token says so."""
    first = torch.softmax(target(torch.tensor([[5, 6, 7]])).logits[0, -1].detach(), -1)
    drafter = DSparkDrafter.from_pretrained(folders[0])
    ids = torch.tensor([[5, 6, 7]]).repeat(400, 1)
    out = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, do_sample=True, top_k=0,
        max_new_tokens=3, pad_token_id=0,
    )  # fmt: skip
    share = float((out[:, 3] == first.argmax()).float().mean())
    assert abs(share - float(first.max())) < 4 * (float(first.max()) / 400) ** 0.5


def test_adapters_leave_and_the_drafter_is_as_before(folders, target) -> None:
    expected = alone(folders, target)
    drafter = DSparkDrafter.from_pretrained(folders[0], adapter_name="code")
    drafter.load_adapter(folders[1], "chat")
    drafter.delete_adapter("chat")
    drafter.set_adapter("code")
    assert same_drafts(drafts(drafter, target), expected[0])
    with pytest.raises(ValueError, match="has no adapter 'chat'; it has code"):
        drafter.set_adapter("chat")
    drafter.delete_adapter("code")
    assert same_drafts(drafts(drafter, target), expected[2])
    assert drafter.state_dict().keys() == DSparkDrafter.from_pretrained(folders[2]).state_dict().keys()
    with pytest.raises(ValueError, match="it has none"):
        drafter.set_adapter("code")


def test_settings_and_copies(folders, target) -> None:
    drafter = DSparkDrafter.from_pretrained(folders[0])
    drafter.speculation = SpeculationConfig(num_assistant_tokens=1)
    twin = copy.deepcopy(drafter)
    assert same_drafts(drafts(twin, target), drafts(drafter, target))
    assert text(target, assistant_model=twin) == text(target)
    assert max(twin.last_stats.verified) == 1
    model = peft.PeftModel.from_pretrained(DSparkDrafter.from_pretrained(folders[2]), folders[0])
    model.speculation = SpeculationConfig(num_assistant_tokens=1)
    with pytest.raises(ValueError, match=r"set on the PeftModel .* `model\.get_base_model\(\)\.speculation"):
        text(target, assistant_model=model)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_packed_layers_keep_adapters(target, kind) -> None:
    model = shaken(peft.get_peft_model(tiny.drafter_for(target), KINDS[kind]()), seed=3)
    drafter = model.get_base_model()
    before, plain, tensors = drafts(model, target), text(target), state_hash(drafter)
    with optimize_for_cpu(model) as handle:
        assert any("base_layer" in name for name in handle.packed)
        torch.testing.assert_close(drafts(model, target).logits, before.logits, rtol=1e-5, atol=1e-5)
        assert text(target, assistant_model=model) == plain
        with model.disable_adapter():
            assert text(target, assistant_model=model) == plain
        if kind != "ia3":
            with pytest.raises(RuntimeError, match="packed weight is refused"):
                drafter.merge_and_unload()
    assert same_drafts(drafts(model, target), before)
    assert state_hash(drafter) == tensors


# --- adapters of the target -----------------------------------------------------------------------------------------


def adapted(target, **options):
    """A target with two adapters that change its text."""
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], **options}
    model = peft.get_peft_model(target, peft.LoraConfig(**config), "one")
    model.add_adapter("two", peft.LoraConfig(**config))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.4, generator=draw)
    return model.eval()


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_target_switches_adapters_under_one_drafter(target, task) -> None:
    drafter, plain = tiny.drafter_for(target), text(target)
    model = adapted(target, task_type=task, modules_to_save=["embed_tokens", "lm_head"])
    texts = []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        texts.append(text(model))
        assert text(model, assistant_model=drafter) == texts[-1]
        assert drafter.shared_modules(model).lm_head is target.get_output_embeddings()
    assert texts[0] == texts[2] != texts[1]
    with model.disable_adapter():
        assert text(model, assistant_model=drafter) == text(model) == plain


def test_the_pairing_check_sees_which_adapter_runs(target) -> None:
    drafter = tiny.drafter_for(target)
    model = peft.get_peft_model(target, peft.LoraConfig(r=2, target_modules=["q_proj"]), "fresh")
    assert check_pair(model, drafter) == []  # without effect as yet
    target = model.unload()
    model = adapted(target)
    notes = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        notes[name] = fingerprint(model)
        (finding,) = check_pair(model, drafter)
        assert (finding.severity, finding.field) == ("warning", "fingerprint")
        assert "its active adapters differ" in finding.message
        with model.disable_adapter():
            assert check_pair(model, drafter) == []
    assert notes["one"]["layer_hashes"] == drafter.config.target["layer_hashes"]
    assert notes["one"]["adapter_hash"] != notes["two"]["adapter_hash"]
    drafter.config.target = notes["one"]  # as trained beside it
    assert len(check_pair(model, drafter)) == 1
    model.set_adapter("one")
    assert check_pair(model, drafter) == []
    merged = model.merge_and_unload()
    assert any("of 7 sampled matrices" in finding.message for finding in check_pair(merged, drafter))


def test_a_drafter_is_made_and_trained_for_a_target_with_an_adapter(target, tmp_path) -> None:
    """The warm start reads the weights under the adapter; the features are those of the active one."""
    plain = tiny.drafter_for(target)
    model, data = adapted(target), tiny.answers(tmp_path)
    drafter = tiny.drafter_for(model)
    assert torch.equal(drafter.layers[0].self_attn.q_proj.weight, plain.layers[0].self_attn.q_proj.weight)
    assert check_pair(model, drafter) == []
    before = state_hash(target)
    tiny.trainer(tmp_path / "run", drafter, model, data, max_steps=2).train()
    assert state_hash(target) == before
    write_features(model, data, tmp_path / "features", drafter.config.target_layer_ids)
    stored = FeatureDataset(tmp_path / "features")
    stored.check_fits(model, drafter.config.context_width)
    model.set_adapter("two")
    with pytest.raises(FeaturesError, match="adapter_hash"):
        stored.check_fits(model, drafter.config.context_width)


def test_rows_with_adapters_of_their_own_are_refused_beforehand(target) -> None:
    model, drafter = adapted(target), tiny.drafter_for(target)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    with pytest.raises(ValueError, match=r"`adapter_names` gives each row .* after `set_adapter`"):
        model.generate(input_ids=ids, adapter_names=["one", "two"], assistant_model=drafter, **how)
    for row, name in zip(ids, ("one", "two"), strict=True):
        plain = model.generate(input_ids=row[None], adapter_names=[name], max_new_tokens=4, do_sample=False)
        ours = model.generate(
            input_ids=row[None], adapter_names=[name], max_new_tokens=4, do_sample=False, assistant_model=drafter
        )
        assert torch.equal(plain, ours)


def test_an_adapter_of_the_target_is_not_one_of_the_drafter(target, tmp_path) -> None:
    adapted(target).save_pretrained(tmp_path, selected_adapters=["one"])
    with pytest.raises(ValueError, match="was trained on a LlamaForCausalLM, not on a DSpark drafter"):
        DSparkDrafter.from_pretrained(tmp_path, subfolder="one")
