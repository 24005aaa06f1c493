"""Writing tensor by tensor: files the library reads, shards, sums, memory of about one tensor.

Catches: a header that is off, a shard too large, a sum of other bytes, a whole file or checkpoint in memory.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dspark.conversion import StoredTensor, convert, expected_tensors
from dspark.conversion.stream import parse_size, write_tensors
from safetensors.torch import load_file, save_file

from dspark import DSparkConfig, DSparkDrafter
from tests.conversion import toys

MB = 10**6


def stored(tensor: torch.Tensor) -> StoredTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor("none", "x", dtype, tuple(tensor.shape), lambda: tensor, tensor.nbytes)


TENSORS = {
    "odd": torch.randn(3, 5, dtype=torch.bfloat16), "wide": torch.randn(7, dtype=torch.float64),
    "ids": torch.arange(9), "mask": torch.arange(5) > 2, "one": torch.tensor(2.5), "none": torch.zeros(0, 4),
    "turned": torch.randn(4, 6).T,
}  # fmt: skip


def test_the_library_reads_what_is_written(tmp_path) -> None:
    sums = write_tensors(tmp_path, {name: stored(t) for name, t in TENSORS.items()}, dtype=None, max_shard_size=MB)
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) and read[name].dtype == TENSORS[name].dtype for name in read)
    data = (tmp_path / "model.safetensors").read_bytes()
    assert sums == [("model.safetensors", len(data), hashlib.sha256(data).hexdigest())]
    save_file({name: t.contiguous() for name, t in TENSORS.items()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert len(data) == (tmp_path / "theirs").stat().st_size
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    widths = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "BOOL": 1}
    for name, entry in entries.items():
        assert name == "__metadata__" or entry["data_offsets"][0] % widths[entry["dtype"]] == 0


def test_shards_keep_to_their_size_and_the_index_knows_them(tmp_path) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(7)}
    seen = []
    sums = write_tensors(
        tmp_path, {name: stored(t) for name, t in tensors.items()}, dtype="float16", max_shard_size=600,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [entry.name for entry in sums] == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 1400}
    for name in names:
        held = load_file(tmp_path / name)
        assert sum(t.nbytes for t in held.values()) <= 600
        assert all(index["weight_map"][key] == name and torch.equal(held[key].float(), tensors[key]) for key in held)
    assert seen == [(200 * i, 1400) for i in range(1, 8)]


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path) -> None:
    tensors = {"a": torch.ones(10), "b": torch.ones(1000), "c": torch.ones(10)}
    write_tensors(tmp_path, {name: stored(t) for name, t in tensors.items()}, dtype=None, max_shard_size=100)
    assert list(load_file(tmp_path / "model-00002-of-00003.safetensors")) == ["b"]


@pytest.mark.parametrize(("tensor", "dtype", "words"), [
    (torch.tensor([1.0, float("nan")]), None, "NaN or infinite"),
    (torch.tensor([1.0, 1e6]), "float16", "numbers that float16 cannot hold"),
])  # fmt: skip
def test_numbers_that_are_none_are_not_written(tensor, dtype, words, tmp_path) -> None:
    with pytest.raises(ValueError, match=words):
        write_tensors(tmp_path, {"x": stored(tensor)}, dtype=dtype, max_shard_size=MB)


@pytest.mark.parametrize(("text", "size"), [
    ("5GB", 5 * 10**9), ("256mb", 256 * MB), ("1 GiB", 2**30), ("0.5KB", 500), ("7", 7),
])  # fmt: skip
def test_sizes(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5 apples", "-1GB", "0", "0.1B", "GB"])
def test_what_is_no_size_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"5GB or 256MB, got"):
        parse_size(text)


def test_sharded_source_and_result(tmp_path) -> None:
    """Many files in, many files out, in another number; the same drafter."""
    source = tmp_path / "source"
    toys.drafter("gated").save_pretrained(source, max_shard_size="8KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    report = convert(source, tmp_path / "out", to="dspark", max_shard_size="20KB")
    assert (
        1
        < len([entry for entry in report.files if entry.name.endswith(".safetensors")])
        < len(list(source.glob("*.safetensors")))
    )
    one, other = (DSparkDrafter.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    for entry in report.files:
        data = (tmp_path / "out" / entry.name).read_bytes()
        assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


_MEASURE = """
import resource, sys
import torch
torch.set_num_threads(1)
from dspark.conversion import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], to="vllm", max_shard_size="256MB", dtype=sys.argv[3] or None)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def synthetic(folder: Path, **sizes: int) -> int:
    """A drafter of random bits in shards, made without holding it; its bytes."""
    config = DSparkConfig(
        num_attention_heads=8, num_key_value_heads=2, block_size=7, mask_token_id=3, target_layer_ids=[1, 3],
        num_target_layers=6, share_embedding=False, share_lm_head=False, **sizes,
    )  # fmt: skip
    folder.mkdir()
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    tensors = {
        name: StoredTensor(
            "none", name, "bfloat16", shape, lambda shape=shape: torch.rand(shape, dtype=torch.bfloat16), 0
        )
        for name, shape in expected_tensors(config).items()
    }
    return sum(entry.bytes for entry in write_tensors(folder, tensors, dtype=None, max_shard_size=100 * MB))


def peak(source: Path, destination: Path, dtype: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, source, destination, dtype], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux")
def test_two_hundred_megabytes_in_less_than_one_hundred(tmp_path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "vocab_size": 12000}
    size = synthetic(tmp_path / "source", **sizes)
    assert size > 190 * MB
    for dtype in ("", "fp32"):
        assert peak(tmp_path / "source", tmp_path / f"out{dtype}", dtype) < 100 * MB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts kilobytes on Linux")
def test_a_gigabyte_in_less_than_four_hundred_megabytes(tmp_path) -> None:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "vocab_size": 40000}
    assert synthetic(tmp_path / "source", **sizes) > 1000 * MB
    assert peak(tmp_path / "source", tmp_path / "out") < 400 * MB
