"""The function behind `custom_generate=place`, called in this process."""

from __future__ import annotations

import pytest

from dspark.decoding import repository
from dspark.decoding.repository import generate_from_repository
from dspark.publishing import write_code
from tests.cards import reports


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, drafter = reports.pair(tmp_path_factory.mktemp("pair"))
    write_code(drafter)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    return model, tokenizer("w1 w2 w3", return_tensors="pt"), drafter


HOW = {"do_sample": False, "max_new_tokens": 8, "return_dict_in_generate": True}


def test_settings_of_the_call_reach_the_loop(loaded) -> None:
    model, inputs, drafter = loaded
    there = {"custom_generate": str(drafter), "trust_remote_code": True}
    out = model.generate(**inputs, **HOW, **there, num_assistant_tokens=1)
    assert set(out.speculation.verified) <= {0, 1}
    assert model.generate(**inputs, **HOW).sequences.tolist() == out.sequences.tolist()


def test_a_drafter_is_loaded_once_per_target(loaded, monkeypatch) -> None:
    model, inputs, drafter = loaded
    there = {"custom_generate": str(drafter), "trust_remote_code": True}
    model.generate(**inputs, **HOW, **there)
    monkeypatch.setattr(repository.DSparkDrafter, "from_pretrained", None)
    model.generate(**inputs, **HOW, **there)


def test_a_drafter_of_one_s_own(loaded) -> None:
    model, inputs, drafter = loaded
    function = model.load_custom_generate(str(drafter), trust_remote_code=True)
    assert function is generate_from_repository
    assert function(model, drafter=drafter, **inputs, **HOW).speculation.num_rounds > 0
    with pytest.raises(ValueError, match="Pass `drafter=`"):
        function(model, **inputs, **HOW)


def test_two_loops_are_refused(loaded) -> None:
    model, inputs, drafter = loaded
    with pytest.raises(ValueError, match="both choose the decoding loop"):
        generate_from_repository(model, drafter=drafter, assistant_model=model, **inputs)
