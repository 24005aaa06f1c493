"""Every kernel compiles for the GPUs we name, on a machine without one: no spilled registers, shared memory that fits.

Catches: an operation that one backend lacks, tiles too large for a chip, a tensor that lands in local memory.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted here", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dspark.ops.confidence import triton as confidence  # noqa: E402
from dspark.ops.markov_step import triton as markov  # noqa: E402
from dspark.ops.markov_step import triton_candidates as candidates  # noqa: E402
from dspark.ops.markov_step import triton_features as features  # noqa: E402
from dspark.ops.rejection import triton as rejection  # noqa: E402
from dspark.ops.training_loss import triton as training_loss  # noqa: E402

# Shared memory a block may ask for, in bytes; the smallest chip of each generation.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166_912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232_448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232_448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65_536),
}
MOST_REGISTERS = 192
RANK = 256
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Pointer types by argument; the model's own tensors take the case's dtype, whole numbers are int32.
POINTERS = {
    "forbidden_ptr": "*i1", "temperatures_ptr": "*fp32", "noise_ptr": "*fp32", "law_ptr": "*fp32",
    "floats_ptr": "*fp32", "ints_ptr": "*i32", "log_probs_ptr": "*fp32", "draft_probs_ptr": "*fp32",
    "target_probs_ptr": "*fp32", "uniforms_ptr": "*fp64", "peaks_ptr": "*fp32", "scale": "fp32",
    "states_ptr": "*fp32", "scores_ptr": "*fp32", "weights_ptr": "*fp32", "target_ptr": "*fp32", "ce_ptr": "*fp32",
    "distance_ptr": "*fp32", "ce": "fp32", "l1": "fp32",
}  # fmt: skip
WEIGHTS = ("base_ptr", "w1_ptr", "w2_ptr", "weight_ptr", "hidden_ptr", "features_ptr", "bias_ptr", "logits_ptr",
           "gradient_ptr")  # fmt: skip
SAMPLING = ("temperatures_ptr", "seeds_ptr", "offsets_ptr", "noise_ptr")


class Case(NamedTuple):
    kernel: object
    constants: dict
    dtype: str = "bf16"


def tile(rows: int, dtype: str, *, samples: bool, gathers: bool = True) -> Case:
    absent = dict.fromkeys(("noise_ptr",) if samples else SAMPLING)
    options = markov.tile_options(rows, RANK, DTYPES[dtype])
    constants = {**absent, "SAMPLES": samples, "GATHERS": gathers, **options}
    return Case(markov._markov_tile_kernel, constants, dtype)


def over_candidates(count: int, dtype: str, *, samples: bool, gathers: bool = True) -> Case:
    absent = dict.fromkeys(("noise_ptr",) if samples else SAMPLING)
    options = candidates.candidate_options(count, RANK)
    constants = {**absent, "SAMPLES": samples, "GATHERS": gathers, **options}
    return Case(candidates._markov_candidates_kernel, constants, dtype)


def of_features(dtype: str, *, recurs: bool) -> Case:
    constants = {"RECURS": recurs, "BLOCK_F": features._BLOCK_F, "BLOCK_I": features._BLOCK_I}
    return Case(features._markov_features_kernel, constants if recurs else {**constants, "states_ptr": None}, dtype)


def of_loss(dtype: str, **constants) -> Case:
    constants = {"BLOCK": training_loss._BLOCK, "num_warps": training_loss._WARPS, **constants}
    return Case(training_loss._training_loss_kernel, constants, dtype)


REJECTION = {"BLOCK_V": 1024, "BLOCK_T": 256, "BLOCK_K": 16}
CASES = {
    "tile, one row, greedy": tile(1, "bf16", samples=False),
    "tile, one row, sampled": tile(1, "fp32", samples=True),
    "tile, eight rows, greedy": tile(8, "fp32", samples=False),
    "tile, eight rows, sampled": tile(8, "bf16", samples=True),
    "choose, greedy": Case(markov._markov_choose_kernel, {"SAMPLES": False, "BLOCK_T": 512, "BLOCK_V": 1024}),
    "choose, sampled": Case(markov._markov_choose_kernel, {"SAMPLES": True, "BLOCK_T": 512, "BLOCK_V": 1024}),
    "64 candidates, sampled": over_candidates(64, "bf16", samples=True),
    "1024 candidates, greedy": over_candidates(1024, "fp32", samples=False),
    "64 candidates, features": over_candidates(64, "bf16", samples=False, gathers=False),
    "tile, eight rows, features": tile(8, "bf16", samples=False, gathers=False),
    "features, gated": of_features("bf16", recurs=False),
    "features, recurrent": of_features("fp32", recurs=True),
    "confidence": Case(confidence._confidence_kernel, {"BLOCK": confidence._BLOCK}),
    "training loss": of_loss("bf16"),
    "training loss, fp32": of_loss("fp32"),
    "training loss, cross-entropy alone": of_loss("bf16", target_ptr=None, distance_ptr=None),
    "training loss, no gradient": of_loss("bf16", gradient_ptr=None),
    "rejection, peaks": Case(rejection._rejection_peak_kernel, REJECTION),
    "rejection, sums": Case(rejection._rejection_sum_kernel, REJECTION),
    "rejection, pick": Case(rejection._rejection_pick_kernel, {**REJECTION, "num_warps": rejection._PICK_WARPS}),
    "rejection, peaks, greedy drafts": Case(
        rejection._rejection_peak_kernel, {**REJECTION, "draft_probs_ptr": None, "draft_token_ids_ptr": None}
    ),
}


def compiled(case: Case, target: GPUTarget):
    """The kernel as compiled for `target`, with 16-byte aligned pointers as a launch would find them."""
    constants = dict(case.constants)
    warps = constants.pop("num_warps", 4)
    names = case.kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in WEIGHTS:
            signature[name] = f"*{case.dtype}"
        else:
            signature[name] = POINTERS.get(name, "*i64" if name.endswith("_ptr") else "i32")
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("stride_w1", "stride_w2")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return triton.compile(
        ASTSource(case.kernel, signature, places, attributes), target=target, options={"num_warps": warps}
    )


def resources(kernel, folder: Path) -> dict[str, int]:
    """Registers per thread and bytes spilled, as the assembler of the target reports them."""
    if kernel.metadata.target.backend == "hip":
        found = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", kernel.asm["amdgcn"]))
        spilled = int(found["vgpr_spill_count"]) + int(found["sgpr_spill_count"])
        return {"registers": int(found["vgpr_count"]), "spilled": spilled}
    path = folder / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"]) + int(found["LOCAL"])}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spilling(case, target, tmp_path):
    chip, shared = TARGETS[target]
    kernel = compiled(CASES[case], chip)
    usage = resources(kernel, tmp_path)
    print(f"{case} on {target}: {usage['registers']} registers, {kernel.metadata.shared} bytes of shared memory")
    assert usage["spilled"] == 0
    assert 0 < usage["registers"] <= MOST_REGISTERS
    assert kernel.metadata.shared <= shared // 2  # so that two blocks fit a processor
