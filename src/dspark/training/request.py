"""What a training run was asked for, and whether its places on disk allow it: overwriting, resuming."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from ..files import write_atomically
from .adapter import AdapterShape
from .arguments import TrainingConfig
from .builder import DrafterShape
from .data import DataError, TooLong

RUN_NAME = "run.json"


@dataclass
class TrainRequest:
    """What `dspark train` was asked for.

    Attributes:
        target, gguf_file, dtype: What was loaded as the target, and how.
        out: Folder of the finished drafter; checkpoints go to `<out>-checkpoints`. None with `features_only`.
        config: Settings of the trainer; `output_dir` is that checkpoint folder.
        shape: Of a new drafter.
        start_from: Folder or Hub id of a drafter to train on; None: a new one of `shape`.
        adapter: Train an adapter of this shape for that drafter, which stays as it is; None: train the drafter.
        draft_vocab_size: Make a reduced vocabulary of this many tokens, the most frequent in the data.
        data: Answer files; with `features` as well, features are written there first.
        features: Feature folders, joined; with `data` one.
        feature_dtype: How features are written.
        features_only: Stop when they are.
        verify: Compare shards with their hashes.
        too_long: See `read_answers`.
        eval_prompts: Prompt file to decode in evaluations.
        eval_limit: Prompts of it.
        held_out: Sequences kept out of training for evaluations.
        pack_target: Pack the target's linear layers where it runs on a CPU.
        target_name: Public name of the target, for the drafter's note.
        resume: Go on from the last checkpoint.
        overwrite: Replace `out` and start over.
    """

    target: str
    out: Path | None
    config: TrainingConfig
    shape: DrafterShape
    gguf_file: str | None = None
    dtype: str = "auto"
    start_from: str | None = None
    adapter: AdapterShape | None = None
    draft_vocab_size: int | None = None
    data: Sequence[Path] = ()
    features: Sequence[Path] = ()
    feature_dtype: str = "bfloat16"
    features_only: bool = False
    verify: bool = True
    too_long: TooLong = "truncate"
    eval_prompts: Path | None = None
    eval_limit: int = 8
    held_out: int = 0
    pack_target: bool = True
    target_name: str | None = None
    resume: bool = False
    overwrite: bool = False

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)

    def write(self) -> None:
        """Note the request beside the checkpoints, for the comparison when resuming."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.described(), default=str, indent=1)
        write_atomically(self.checkpoints / RUN_NAME, lambda path: path.write_text(text))

    def described(self) -> dict[str, Any]:
        """JSON-able description, for `training.json` and for comparison when resuming."""
        own = {name: value for name, value in vars(self).items() if name not in ("config", "shape", "adapter")}
        adapter = None if self.adapter is None else asdict(self.adapter)
        return {**own, "shape": asdict(self.shape), "adapter": adapter, "config": self.config.to_dict()}


def checkpoint_folder(out: Path) -> Path:
    """Folder of a run's checkpoints, beside its result."""
    return out.with_name(f"{out.name}-checkpoints")


# What may change between a run and its continuation without making it another run.
_FREE = {"resume", "overwrite", "verify", "pack_target", "target_name", "out"}
_FREE_CONFIG = {
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "logging_dir",
    "disable_tqdm",
    "report_to",
    "run_name",
}


def check_places(request: TrainRequest) -> str | None:
    """Refuse to overwrite by accident; returns the checkpoint to resume from, or None.

    Raises:
        DataError: There is nothing to train on, `out` or checkpoints exist, or there is nothing to resume.
    """
    _check_sources(request)
    if request.features_only:
        return None
    if request.adapter is not None and request.start_from is None:
        raise DataError("--peft adapts a drafter that is there: name its folder or Hub id with --init.")
    if request.out is None:
        raise DataError("Say where the drafter goes with --out.")
    if request.out.exists() and not request.overwrite:
        raise DataError(f"{request.out} exists. Choose another --out, or replace it with --overwrite.")
    last = last_checkpoint(request.checkpoints)
    if request.resume:
        if last is None:
            raise DataError(f"There is no checkpoint in {request.checkpoints} to resume from. Leave out --resume.")
        _compare_runs(request)
        return last
    if last is not None and not request.overwrite:
        raise DataError(
            f"{request.checkpoints} holds checkpoints of an earlier run. Go on with it by --resume, or start over by "
            "--overwrite (they are then replaced one by one)."
        )
    return None


def _check_sources(request: TrainRequest) -> None:
    if not request.data and not request.features:
        raise DataError("Nothing to train on: give answers with --data, or features with --features.")
    if request.features_only and not (request.features and request.data):
        raise DataError("Writing features takes both --data (what of) and --features (where to).")
    if request.data and len(request.features) > 1:
        raise DataError(
            f"With --data, --features is the one folder to write, got {len(request.features)}. Write each folder by "
            "itself, then train from all of them without --data."
        )


def last_checkpoint(folder: Path) -> str | None:
    """The last whole checkpoint of a run; one that was being written when the run was killed does not count."""
    whole = [path for path in folder.glob("checkpoint-*") if _is_whole(path)]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def _is_whole(checkpoint: Path) -> bool:
    # The trainer writes this file last.
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True


def _compare_runs(request: TrainRequest) -> None:
    path = request.checkpoints / RUN_NAME
    if not path.exists():
        return
    before, now = json.loads(path.read_text()), json.loads(json.dumps(request.described(), default=str))
    for part, free in ((before, _FREE), (before["config"], _FREE_CONFIG)):
        for name in free:
            part.pop(name, None)
    changed = [name for name in before if name != "config" and before[name] != now[name]]
    changed += [name for name in before["config"] if before["config"][name] != now["config"].get(name)]
    if changed:
        shown = "; ".join(
            f"{name} was {(before | before['config'])[name]!r:.60}, is {(now | now['config'])[name]!r:.60}"
            for name in changed
        )
        raise DataError(
            f"--resume with other settings than the run in {request.checkpoints} ({shown}). Give the same ones, or "
            "start over with --overwrite."
        )


__all__ = ["TrainRequest", "check_places", "checkpoint_folder", "last_checkpoint"]
