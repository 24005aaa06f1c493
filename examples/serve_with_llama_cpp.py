"""Serve a drafter with llama.cpp, and see whether it drafts there as it does here.

    python examples/serve_with_llama_cpp.py --server llama.cpp/build/bin/llama-server \\
        --target SmolLM2-135M-Instruct.Q4_1.gguf --drafter model_cards/smollm2-135m-instruct-dspark

The drafter (in any format that is read) is written as a GGUF file. The server decodes a few prompts greedily without
and with it, and this package with the same target, dequantised. With a float32 target all agree; llama.cpp quantises
the activations of a quantised one too, so texts may part at near ties. Exit code 1: the drafter changed the text.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch
from dspark.conversion import convert
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark import DSparkDrafter
from dspark.evaluation import SETS, chat_ids, sample_prompts

OPTIONS = {
    "server": "llama-server", "target": "", "drafter": "", "dtype": "f32", "prompts": 5, "new-tokens": 64,
    "threads": 2, "cache-type": "f16",
}  # fmt: skip


def ask(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def is_up(process: subprocess.Popen, url: str) -> bool:
    """Whether the server comes up within some minutes."""
    for _ in range(600):
        if process.poll() is not None:
            return False
        try:
            ask(f"{url}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
        else:
            return True
    return False


@contextmanager
def server(command: list[str]):
    """The address of a running server; its log is shown if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
        try:
            if not is_up(process, url := f"http://127.0.0.1:{port}"):
                log.seek(0)
                sys.exit(f"{command[0]} does not start:\n{log.read().decode(errors='replace')[-3000:]}")
            yield url
        finally:
            process.terminate()
            process.wait()


def served(args, prompts: list[list[int]], drafter: list[str]) -> list[dict]:
    """The server's answer to each prompt: tokens, and what it counted."""
    cache = [word for key in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (key, args.cache_type)]
    command = [args.server, "-m", args.target, *drafter, *(cache if drafter else cache[:4])]
    command += ["-c", "2048", "-np", "1", "-t", str(args.threads), "-fa", "off", "--host", "127.0.0.1"]
    asked = {"temperature": 0, "n_predict": args.new_tokens, "cache_prompt": False, "return_tokens": True}
    with server(command) as url:
        return [ask(f"{url}/completion", {"prompt": ids, **asked}) for ids in prompts]


def ours(args, prompts: list[list[int]]) -> list[dict]:
    """The same from this package, in float32."""
    path = Path(args.target)
    target = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32).eval()
    results = []
    for ids in prompts:
        how = {"max_new_tokens": args.new_tokens, "do_sample": False}
        out, stats = target.generate(torch.tensor([ids]), assistant_model=drafter, **how), drafter.last_stats
        timings = {"draft_n": sum(stats.verified), "draft_n_accepted": sum(stats.accepted)}
        results.append({"tokens": out[0, len(ids) :].tolist(), "timings": timings})
    return results


def same(one: dict, other: dict) -> bool:
    """Whether two answers have the same tokens; an end token, which the server leaves out, does not count."""
    shorter, longer = sorted((one["tokens"], other["tokens"]), key=len)
    return len(longer) - len(shorter) <= 1 and longer[: len(shorter)] == shorter


def counted(answers: list[dict], key: str) -> int:
    return sum(answer["timings"].get(key, 0) for answer in answers)


def acceptance(answers: list[dict]) -> float:
    return counted(answers, "draft_n_accepted") / max(counted(answers, "draft_n"), 1)


def row(name: str, plain: list[dict], speculative: list[dict], here: list[dict]) -> list[str]:
    equal = [f"{sum(map(same, speculative, other))}/{len(other)}" for other in (plain, here)]
    counts = [(counted(one, "draft_n_accepted"), counted(one, "draft_n")) for one in (speculative, here)]
    return [name, *equal, *(f"{accepted}/{drafted} {accepted / max(drafted, 1):.3f}" for accepted, drafted in counts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, required=value == "")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = Path(args.target)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    asked = [(name, text) for i in range(args.prompts) for name in SETS for text in sample_prompts(name)[i : i + 1]]
    names, texts = zip(*asked[: args.prompts], strict=True)
    prompts = [chat_ids(tokenizer, text)[0].tolist() for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "drafter.gguf"
        report = convert(args.drafter, written, to="gguf-dflash", target=args.target, dtype=args.dtype)
        words = report.serve_command.split()
        plain = served(args, prompts, [])
        speculative = served(args, prompts, words[words.index("-md") :])
    print(report.serve_command)
    here = ours(args, prompts)
    table = Table("prompts", "text with = without", "text = here", "accepted there", "accepted here")
    for i, name in enumerate(names):
        table.add_row(*row(name, *(answers[i : i + 1] for answers in (plain, speculative, here))))
    table.add_row(*row("all", plain, speculative, here))
    Console().print(table)
    print(f"Accepted there / here: {acceptance(speculative) / max(acceptance(here), 1e-9):.3f}")
    return int(not all(map(same, plain, speculative)))


if __name__ == "__main__":
    sys.exit(main())
