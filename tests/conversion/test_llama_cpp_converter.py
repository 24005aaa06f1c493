"""llama.cpp's own converter, run on a drafter's folder, writes what our writer writes.

Needs a source tree of llama.cpp: set LLAMA_CPP to the folder with `convert_hf_to_gguf.py`. Its converter knows
pre-tokenizers by a list, so the target has the tokenizer of SmolLM2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from dspark.conversion import convert
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dspark.cli.common import demo_target
from tests import small
from tests.conversion import peers

pytest.importorskip("sentencepiece", reason="llama.cpp's converter imports sentencepiece")
LLAMA_CPP = os.environ.get("LLAMA_CPP", "")
ROWS = 49152
pytestmark = pytest.mark.skipif(
    not (Path(LLAMA_CPP) / "convert_hf_to_gguf.py").is_file(), reason="LLAMA_CPP is not a source tree of llama.cpp"
)
# What only one of the two writes: names and sizes of the model, and keys that ours always has.
ABOUT = ("general.name", "general.basename", "general.size_label", "general.finetune", "general.version")
ALWAYS = {"dflash.attention.causal", "dflash.sample_from_anchor", "dflash.has_confidence_head"}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target for our own small drafters, and one of the sizes of z-lab's."""
    folder, name = demo_target()
    found = {}
    for kind, sizes in (("small", {}), ("zlab", {"hidden_size": 64, "num_hidden_layers": 6})):
        found[kind] = path = tmp_path_factory.mktemp(kind)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(path)
        small.target(vocab_size=ROWS, tie_word_embeddings=False, **sizes).save_pretrained(path)
    return found


def folder_of(kind: str, path: Path, target: Path) -> Path:
    """A drafter in the layout that llama.cpp's converter reads."""
    if kind == "zlab":
        return with_rows(peers.folder("zlab010_dflash"), path / "zlab")
    fields = {"vocab_size": ROWS, "mask_token_id": 3}
    if kind == "speculators":
        fields |= {"draft_vocab_size": 18, "sample_from_anchor": False}
    small.drafter(**fields).to(torch.bfloat16).save_pretrained(path / "own")
    convert(path / "own", path / kind, to=kind, target=target)
    return path / kind


def with_rows(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    config = {**json.loads((folder / "config.json").read_text()), "vocab_size": ROWS}
    (copy / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), copy / "model.safetensors")
    return copy


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    return (
        {name: part.contents() for name, part in reader.fields.items() if not name.startswith(("GGUF.", *ABOUT))},
        {tensor.name: tensor for tensor in reader.tensors},
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("kind", ["deepspec", "speculators", "zlab"])
def test_same_keys_and_tensors(kind: str, dtype: str, tmp_path: Path, targets: dict[str, Path]) -> None:
    target = targets.get(kind, targets["small"])
    folder = folder_of(kind, tmp_path, target)
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    script = Path(LLAMA_CPP) / "convert_hf_to_gguf.py"
    subprocess.run(
        [sys.executable, script, folder, "--target-model-dir", target, "--outfile", theirs, "--outtype", dtype],
        check=True,
    )
    convert(folder, ours, to="gguf-dflash", target=target, dtype=dtype)
    (their_keys, their_tensors), (our_keys, our_tensors) = contents(theirs), contents(ours)
    # Its list of pre-tokenizers is no part of the tokenizer.
    assert our_keys.pop("tokenizer.ggml.pre") == "default"
    assert their_keys.pop("tokenizer.ggml.pre") == "smollm"
    assert our_keys.keys() - their_keys.keys() <= ALWAYS
    assert {key: our_keys.get(key) for key in their_keys} == their_keys
    # The whole-vocabulary LM head is left out by theirs: an untied target then gives other drafts.
    assert our_tensors.keys() - their_tensors.keys() == ({"output.weight"} if kind == "deepspec" else set())
    for name, tensor in their_tensors.items():
        assert our_tensors[name].tensor_type == tensor.tensor_type, name
        assert np.array_equal(our_tensors[name].data, tensor.data), name
