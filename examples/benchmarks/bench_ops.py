"""The ops on a GPU: Triton against torch, torch.compile and what the memory allows.

    python examples/benchmarks/bench_ops.py --json ops.json

First every form is held to the torch form, then it is timed; one that disagrees ends the run. Markov weights and
logits are multiples of 1/8 with few bits, so their sums are exact in every form. Columns: microseconds per call
(median), the floor that touching each tensor once sets at the bandwidth a copy reaches on this GPU, and the share of
it the kernels reach. Ends within `--minutes`: what is left is not compiled (a dash), then not measured (said).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dspark.ops.confidence import ConfidenceWeights, confidence_scores
from dspark.ops.markov_step import GatedFeatures, MarkovTables, RecurrentFeatures, Sampling, markov_block
from dspark.ops.rejection import rejection_sample
from dspark.ops.training_loss import TermWeights, training_loss

SLOTS, WIDTH, POSITIONS = 7, 2560, 256  # drafts, drafter width, positions of a training chunk
HALF = torch.bfloat16


class Op(NamedTuple):
    """A call by implementation, the bytes it must move, and how far forms may be apart (0: bit for bit).

    `agreement`: share of tokens that must be equal; drawn noise goes through logarithms that differ in the last place.
    """

    call: Callable[[str], torch.Tensor]
    moved: int
    tolerance: float = 0.0
    agreement: float = 1.0


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median over `repeats` calls after a warm-up, each behind a cleared L2 cache."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def bandwidth(repeats: int) -> float:
    """Bytes per microsecond that a copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source), repeats)


def eighths(*shape: int, limit: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return (torch.randint(-limit, limit + 1, shape, device="cuda") / 8).to(dtype)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(HALF)


def markov_ops(columns: int, rank: int, rows: int) -> dict[str, Op]:
    tables = MarkovTables(eighths(columns, rank, limit=8), eighths(columns, rank, limit=8))
    base, anchors = eighths(rows, SLOTS, columns, limit=64), torch.arange(rows, device="cuda")
    noise = eighths(rows, SLOTS, columns, limit=80, dtype=torch.float32)
    moved = base.nbytes + tables.w2.nbytes * SLOTS
    gated = GatedFeatures(normal(rank, rank, scale=rank**-0.5), normal(rows, SLOTS, rank))
    state = torch.zeros(rows, rank, device="cuda")
    recurrent = RecurrentFeatures(normal(3 * rank, 2 * rank, scale=rank**-0.5), normal(rows, SLOTS, 3 * rank), state)

    def call(weights: MarkovTables = tables, **kwargs: Any) -> Callable[[str], torch.Tensor]:
        return lambda form: markov_block(base, anchors, weights, implementation=form, **kwargs).token_ids

    return {
        "greedy": Op(call(), moved),
        "sampled": Op(call(sampling=Sampling(seeds=anchors)), moved, agreement=0.95),
        "noise given": Op(call(sampling=Sampling(noise=noise)), moved + noise.nbytes),
        "64 candidates": Op(call(candidate_top_k=64), base.nbytes),
        # Features are rounded to bfloat16, either way at a tie, so a near tie of logits may fall either way.
        "gated": Op(call(tables._replace(features=gated)), moved, agreement=0.95),
        "recurrent": Op(call(tables._replace(features=recurrent)), moved, agreement=0.8),
    }


def other_ops(columns: int, rank: int, rows: int) -> dict[str, Op]:
    target = (torch.randn(rows, SLOTS + 1, columns, device="cuda") * 3).softmax(-1)
    draft = (target[:, :-1].log() + torch.randn(rows, SLOTS, columns, device="cuda")).softmax(-1)
    ids = torch.multinomial(draft.flatten(0, 1), 1).view(rows, SLOTS)
    lengths = torch.full((rows,), SLOTS, device="cuda")
    uniforms = torch.rand(rows, SLOTS + 1, dtype=torch.float64, device="cuda")
    hidden, w1 = normal(rows, SLOTS, WIDTH), normal(columns, rank)
    head = ConfidenceWeights(normal(WIDTH + rank, scale=WIDTH**-0.5), normal(1), w1)

    def rejecting(laws: torch.Tensor | None) -> Callable[[str], torch.Tensor]:
        return lambda form: torch.stack(rejection_sample(ids, laws, target, lengths, uniforms, implementation=form))

    def scoring(form: str) -> torch.Tensor:
        return confidence_scores(hidden, ids, head, implementation=form).survival

    law = 4 * columns * rows
    return {
        "rejection": Op(rejecting(draft), 2 * law),
        "rejection, greedy drafts": Op(rejecting(None), law),
        "confidence": Op(scoring, hidden.nbytes, tolerance=1e-5),
    }


def loss_op(columns: int) -> dict[str, Op]:
    logits, labels = normal(POSITIONS, columns, scale=2.0), torch.randint(columns, (POSITIONS,), device="cuda")
    target = (logits.float() + torch.randn(POSITIONS, columns, device="cuda")).softmax(-1)
    weights = torch.rand(POSITIONS, device="cuda")

    def call(form: str) -> torch.Tensor:
        found = training_loss(logits, labels, weights, target, TermWeights(0.1, 0.9), implementation=form)
        assert found.gradient is not None
        return found.gradient.to(HALF)

    return {"training loss, 256 positions": Op(call, 2 * logits.nbytes + target.nbytes, tolerance=1e-2)}


def all_ops(args: argparse.Namespace) -> Iterator[tuple[int, int, str, Op]]:
    """What there is to measure; one shape's tensors at a time."""
    for columns in args.vocab:
        for rows in args.rows:
            ops = markov_ops(columns, args.rank, rows) | other_ops(columns, args.rank, rows)
            yield from ((columns, rows, name, op) for name, op in ops.items())
        yield from ((columns, POSITIONS, name, op) for name, op in loss_op(columns).items())


def check(name: str, form: str, got: torch.Tensor, want: torch.Tensor, op: Op) -> None:
    """Refuse to time a form that gives something else."""
    if op.tolerance:
        agreement = torch.isclose(got, want, rtol=op.tolerance, atol=1e-6).float().mean().item()
        enough = 0.999  # the sign of a difference that is 0 to rounding is either
    else:
        agreement, enough = (got == want).float().mean().item(), op.agreement
    if agreement < enough:
        raise SystemExit(f"not equal, so not measured: {name} in the {form} form agrees on {agreement:.1%}")


def measure(name: str, op: Op, *, compiles: bool, repeats: int) -> dict[str, float | None]:
    """Times of the forms."""
    forms: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: op.call("torch"), "triton": lambda: op.call("triton"),
    }  # fmt: skip
    if compiles:
        forms["compiled"] = torch.compile(lambda: op.call("torch"), dynamic=False)
    want = forms["torch"]()
    for form, run in forms.items():
        check(name, form, run(), want, op)
    return {"compiled": None, **{form: microseconds(run, repeats) for form, run in forms.items()}}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| op | V | rows | torch us | compiled us | triton us | floor us | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        times = " | ".join("-" if r[f] is None else f"{r[f]:.0f}" for f in ("torch", "compiled", "triton", "floor"))
        lines.append(f"| {r['name']} | {r['columns']} | {r['rows']} | {times} | {r['floor'] / r['triton']:.2f} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[151936, 49152])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA or HIP device, and torch sees none.")
    torch.manual_seed(0)
    start, speed, found, left_out = time.monotonic(), bandwidth(args.repeats), [], 0
    for columns, rows, name, op in all_ops(args):
        spent = (time.monotonic() - start) / 60
        if spent > args.minutes:
            left_out += 1
            continue
        torch.compiler.reset()
        times = measure(name, op, compiles=spent < 0.7 * args.minutes, repeats=args.repeats)
        found.append({"name": name, "columns": columns, "rows": rows, "floor": op.moved / speed, **times})
        print(table(found[-1:]).splitlines()[-1], flush=True)
    print(f"{torch.cuda.get_device_name()}, copy at {speed / 1e6:.2f} TB/s\n{table(found)}")
    if left_out:
        print(f"{left_out} not measured for lack of time: raise --minutes, or name fewer sizes.")
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        report = {"settings": settings, "device": torch.cuda.get_device_name(), "bytes_per_us": speed, "rows": found}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
