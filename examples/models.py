"""The pair of models the examples run on: `--target` and `--drafter`, or what `dspark demo` takes."""

from __future__ import annotations

import argparse

import torch

from dspark.cli.common import demo_drafter, demo_target
from dspark.cli.loading import load_pair


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options every example has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", help="folder or Hub id (default: SmolLM2-135M-Instruct, as in `dspark demo`)")
    options.add_argument("--drafter", help="folder or Hub id (default: the one under model_cards/)")
    options.add_argument("--gguf-file", help="GGUF file in the target's folder")
    options.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    options.add_argument("--max-new-tokens", type=int, default=96)
    return options


def load(args: argparse.Namespace):
    """Target, tokenizer and drafter in fp32."""
    torch.set_num_threads(args.threads)
    target, gguf_file = (args.target, args.gguf_file) if args.target else demo_target()
    return load_pair(target, args.drafter or demo_drafter(), gguf_file, torch.float32)
