"""Attention by key heads against copies of keys and values: a target's pass over several rows, side by side.

    python examples/benchmarks/bench_attention.py --model path/or/id --shape 8x2 --shape 8x8 --context 200 --threads 2

A shape is rows x tokens of each. Both forms run in turns and their logits are compared; a line has the median of each
and their ratio. Without `--model` a small random Llama with 3 key heads for 9 query heads runs.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import dspark
from dspark.decoding import ragged_attention
from dspark.decoding.ragged_batch import RaggedBatch
from dspark.stats import SpeculationStats

GROUPED, COPIED = ragged_attention.head_groups, lambda *_: 1


def verification(model: torch.nn.Module, rows: int, width: int, context: int):
    """A function that runs one pass of `rows` rows of `width` tokens behind `context` cached ones, for its logits."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(model.config.vocab_size, (rows, context + width))
    model(ids[:, :context], **{dspark.compat.cache_name(model): cache}, use_cache=True)
    last = torch.full((rows, 1), context - 1)  # position of each row's last prompt token
    batch = RaggedBatch(model, {"use_cache": True}, cache, last, SpeculationStats())
    blocks = ids[:, context:].tolist()

    def forward(inputs):
        output = model(**inputs, return_dict=True)
        return output, output.logits

    return lambda: batch.verify(blocks, forward)[1]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id of a target")
    parser.add_argument("--gguf-file")
    parser.add_argument("--shape", action="append", help="rows x tokens, repeatable")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 4}
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, gguf_file=args.gguf_file, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, intermediate_size=576, **sizes))
    with dspark.optimize_for_cpu(model.eval()):
        for shape in args.shape or ["2x8", "4x4", "8x2", "8x8"]:
            rows, width = map(int, shape.split("x"))
            step, logits, seconds = verification(model, rows, width, args.context), {}, {GROUPED: [], COPIED: []}
            for repeat in range(args.repeats + 1):
                for form in seconds:
                    ragged_attention.head_groups = form
                    start = time.perf_counter()
                    logits[form] = step()
                    if repeat:
                        seconds[form].append(time.perf_counter() - start)
            torch.testing.assert_close(logits[GROUPED], logits[COPIED], atol=1e-3, rtol=1e-3)
            grouped, copied = median(seconds[GROUPED]), median(seconds[COPIED])
            print(f"{shape}: {1e3 * grouped:.2f} ms, copied {1e3 * copied:.2f} ms, ratio {grouped / copied:.2f}")


if __name__ == "__main__":
    main()
