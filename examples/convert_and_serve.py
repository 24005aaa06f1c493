"""Write the drafter for another engine, check that it drafts the same there, and print the engine's command.

    python examples/convert_and_serve.py --to vllm --as-qwen3 --out drafter-vllm

What a format cannot hold is refused with the field named; `dspark convert` is the same as a command. The demo's
drafter has Llama's layers, which engines run as Qwen3's (`--as-qwen3`: the same up to rounding).
"""

from pathlib import Path

from dspark.conversion import WRITERS, convert
from models import load, parser

from dspark import DSparkDrafter
from dspark.cli.common import demo_drafter, demo_target
from dspark.evaluation import chat_ids

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--to", choices=sorted(WRITERS), default="dspark", help="format of the result")
    options.add_argument("--as-qwen3", action="store_true", help="write Llama-like layers as Qwen3's")
    options.add_argument("--out", type=Path, default=Path("converted-drafter"))
    args = options.parse_args()
    source, target = args.drafter or demo_drafter(), args.target or "/".join(demo_target())
    try:
        report = convert(
            source, args.out, to=args.to, target=target, target_gguf_file=args.gguf_file, as_qwen3=args.as_qwen3,
            verify=True, tolerance=1e-3 if args.as_qwen3 else 0.0,
        )  # fmt: skip
    except ValueError as error:
        raise SystemExit(f"not written: {error}") from error
    print(f"{report.read_as} -> {report.written_as}: {', '.join(file.name for file in report.files)}")
    print("not kept:", ", ".join(report.not_kept) or "nothing is lost")
    for warning in report.warnings:
        print("warning:", warning)

    model, tokenizer, drafter = load(args)
    again = DSparkDrafter.from_pretrained(args.out, dtype=drafter.dtype).eval()
    ids = chat_ids(tokenizer, "What is 17 times 23?")
    accepted = []
    for each in (drafter, again):
        model.generate(ids, assistant_model=each, do_sample=False, max_new_tokens=args.max_new_tokens)
        accepted.append(each.last_stats.accepted)
    print("accepts the same drafts:", accepted[0] == accepted[1])
    print("serve it:", report.serve_command)
