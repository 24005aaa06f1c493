"""The shipped drafter in an engine's layout, with the real target's tables read from its GGUF file.

Catches: tables that are not the ones transformers loads, layers rewritten for an engine that draft otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dspark.conversion import convert, open_target

from dspark import DSparkDrafter
from dspark.cli.common import demo_drafter, demo_target
from dspark.cli.loading import load_drafter, load_target
from dspark.evaluation import chat_ids, sample_prompts

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def target():
    folder, file = demo_target()
    return load_target(folder, file, torch.float32)


def test_tables_are_those_transformers_loads(target) -> None:
    folder, file = demo_target()
    found = open_target(folder, gguf_file=file)
    embedding, head = found.tables()
    model = target[0]
    assert torch.equal(embedding[...], model.get_input_embeddings().weight)
    assert torch.equal(head[...], model.get_output_embeddings().weight)
    assert (found.embedding_factor, found.num_hidden_layers) == (1.0, model.config.num_hidden_layers)


def test_the_shipped_drafter_drafts_the_same_as_a_qwen3_drafter(target, tmp_path) -> None:
    folder, file = demo_target()
    report = convert(
        demo_drafter(), tmp_path / "out", to="vllm", target=Path(folder) / file, as_qwen3=True, verify=True,
        tolerance=0.05,
    )  # fmt: skip
    assert report.verification.tokens_equal
    model, tokenizer = target
    ids = chat_ids(tokenizer, sample_prompts("gsm8k")[0])
    lengths = []
    for drafter in (load_drafter(demo_drafter(), torch.float32), DSparkDrafter.from_pretrained(tmp_path / "out")):
        out = model.generate(
            ids, do_sample=False, max_new_tokens=32, assistant_model=drafter.float(), return_dict_in_generate=True
        )
        lengths.append(out.speculation.mean_acceptance_length)
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)
