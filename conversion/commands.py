"""The command that serves a written drafter, one function per engine: record, target and folder to a shell line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from .record import Record

TENSORRT_FILE = "tensorrt_llm.yaml"


def ours(_record: Record, target: str, folder: str) -> str:
    """This package."""
    return shlex.join(["dspark", "generate", "Hello", "--target", target, "--drafter", folder])


def vllm(record: Record, target: str, folder: str) -> str:
    """vLLM, DSpark; the method is said, as a path with "dflash" in it would decide it otherwise."""
    return _vllm(record, target, folder, "dspark")


def vllm_dflash(record: Record, target: str, folder: str) -> str:
    """vLLM, DFlash."""
    return _vllm(record, target, folder, "dflash")


def vllm_or_ours(record: Record, target: str, folder: str) -> str:
    """vLLM for the sequential head it runs, this package for others."""
    return vllm(record, target, folder) if record["markov_head_type"] == "vanilla" else ours(record, target, folder)


def _vllm(record: Record, target: str, folder: str, method: str) -> str:
    settings = {"method": method, "model": folder, "num_speculative_tokens": record.num_draft_tokens}
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(settings, separators=(",", ":"))])


def sglang(record: Record, target: str, folder: str) -> str:
    """SGLang, DSpark, with the file of confidence temperatures where there is one."""
    words = [*_sglang(target, folder, "DSPARK"), "--speculative-dspark-block-size", str(record.num_draft_tokens)]
    if record["confidence_temperatures"] is not None:
        file = next(iter(sts_files(record["confidence_temperatures"])))
        words += ["--speculative-dspark-confidence-sts-path", f"{folder}/{file}"]
    # Without a confidence head only blocks of one fixed length can be verified.
    return ("" if record["enable_confidence_head"] else "SGLANG_RAGGED_VERIFY_MODE=static ") + shlex.join(words)


def sts_files(rows: list[float] | Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Names of SGLang's files of confidence temperatures; a server takes one, the first has the lowest temperature."""
    if not isinstance(rows, Mapping):
        return {"confidence_sts.json": rows}
    return {f"confidence_sts_t{float(key):g}.json": rows[key] for key in sorted(rows, key=float)}


def sglang_dflash(record: Record, target: str, folder: str) -> str:
    """SGLang, DFlash."""
    block = ["--speculative-dflash-block-size", str(record["block_size"])]
    return shlex.join([*_sglang(target, folder, "DFLASH"), *block])


def _sglang(target: str, folder: str, algorithm: str) -> list[str]:
    return [
        "python", "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", algorithm,
        "--speculative-draft-model-path", folder,
    ]  # fmt: skip


def tensorrt_llm(_record: Record, target: str, folder: str) -> str:
    """TensorRT-LLM, by the settings that were written beside the weights."""
    return shlex.join(["trtllm-serve", target, "--extra_llm_api_options", f"{folder}/{TENSORRT_FILE}"])


def mlx_dspark(record: Record, target: str, folder: str) -> str:
    """mlx-dspark."""
    how = ["--mode", "dspark", "--max-draft", str(record.num_draft_tokens)]
    return shlex.join(["mlx-dspark", "serve", "--model", target, "--drafter", folder, *how])


def transformers_dflash(_record: Record, target: str, folder: str) -> str:
    """transformers' own DFlash: a setting of the `generate` call, not of the assistant's generation config."""
    code = (
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer as T; "
        f"m = AutoModelForCausalLM.from_pretrained({target!r}); t = T.from_pretrained({target!r}); "
        f"a = AutoModel.from_pretrained({folder!r}); "
        "print(t.decode(m.generate(**t('Hello', return_tensors='pt'), assistant_model=a, "
        "speculation_type='dflash', max_new_tokens=64)[0]))"
    )
    return shlex.join(["python", "-c", code])


__all__ = [
    "TENSORRT_FILE", "mlx_dspark", "ours", "sglang", "sglang_dflash", "sts_files", "tensorrt_llm",
    "transformers_dflash", "vllm", "vllm_dflash", "vllm_or_ours",
]  # fmt: skip
