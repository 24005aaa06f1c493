"""Generate with a drafter, and see what it did.

    python examples/generate.py "Name three prime numbers."

The ids are those of plain `generate`; what changes is how many passes of the target they take.
"""

from models import load, parser

from dspark import optimize_for_cpu
from dspark.evaluation import chat_ids

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("prompt", nargs="?", default="What is 17 times 23? Show your steps.")
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    ids = chat_ids(tokenizer, args.prompt)
    how = {"do_sample": False, "max_new_tokens": args.max_new_tokens}

    with optimize_for_cpu(model), optimize_for_cpu(drafter):  # for the CPU; leave it out on an accelerator
        plain = model.generate(ids, **how)
        out = model.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **how)

    stats = out.speculation
    print(tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True))
    print(f"ids equal plain generate: {out.sequences.equal(plain)}")
    print(f"{stats.num_new_tokens} tokens in {stats.num_target_passes} passes of the target")
    print(f"accepted length {stats.mean_acceptance_length:.2f}: tokens per round, the target's own included")
    print("accepted drafts per round, counted:", dict(enumerate(stats.acceptance_histogram())))
    print("acceptance per draft position:", " ".join(f"{rate:.2f}" for rate in stats.conditional_acceptance()))
