"""Many texts at once, with a policy that decides per round and row how much is verified.

    python examples/batch_with_scheduler.py --policy auto

Texts join the batch when there is room and leave when they end; each is what it would be alone. On the real pair
compare the policies with `dspark bench batches`.
"""

import time

import torch
from models import load, parser

from dspark import BatchDecoder, SpeculationConfig, optimize_for_cpu
from dspark.evaluation import SETS, chat_ids, sample_prompts
from dspark.scheduling import POLICIES

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--policy", choices=POLICIES, default="auto")
    options.add_argument("--rows", type=int, default=4, help="texts decoded together")
    options.add_argument("--prompts", type=int, default=1, help="per shipped set")
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    drafter.speculation = SpeculationConfig(policy=args.policy)
    ids = [chat_ids(tokenizer, text) for name in SETS for text in sample_prompts(name, args.prompts)]
    how = {"do_sample": False, "max_new_tokens": args.max_new_tokens}

    with optimize_for_cpu(model), optimize_for_cpu(drafter):
        start = time.perf_counter()
        with BatchDecoder(model, drafter, max_rows=args.rows) as decoder:
            # A generator of settings: the next text is taken when a row is free.
            finished = list(decoder.run({"input_ids": prompt, **how} for prompt in ids))
        seconds = time.perf_counter() - start
        alone = model.generate(ids[0], **how)[0, ids[0].shape[1] :]

    tokens = sum(len(text.new_ids) for text in finished)
    print(f"{len(finished)} texts, {tokens} tokens, {tokens / seconds:.1f} tokens per second, policy {args.policy}")
    print("reasons:", sorted({text.reason for text in finished}))
    first = next(text for text in finished if torch.equal(text.submission.input_ids, ids[0]))
    print("the first text is what it is alone:", first.new_ids == alone.tolist())
    print(tokenizer.decode(first.new_ids, skip_special_tokens=True))
