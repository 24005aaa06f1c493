"""Make a drafter's confidence mean what it says, and use it: block by block, verify only what is likely to pay.

    python examples/calibrate.py --prompts 24

Decodes prompts, keeps every round's raw confidence, fits one temperature per draft position on some of the prompts and
judges it on the others. `dspark calibrate` is the same as a command and writes the temperatures into the drafter.
"""

from models import load, parser

from dspark import SpeculationConfig, optimize_for_cpu
from dspark.calibration import fit_sequential_temperatures, position_reliability
from dspark.evaluation import chat_ids, sample_prompts
from dspark.stats import SpeculationStats


def decode(model, drafter, prompts, how, settings):
    """Statistics of all prompts together."""
    merged = SpeculationStats()
    for ids in prompts:
        model.generate(ids, assistant_model=drafter, speculation=settings, **how)
        merged = merged.merge(drafter.last_stats)
    return merged


def columns(stats):
    """Logits, verified and accepted counts of the rounds that had a draft."""
    return [list(column) for column in zip(*stats.scored_rounds(), strict=True)]


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--set", default="gsm8k", help="a shipped prompt set")
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--min-rounds", type=int, default=32, help="a position with fewer rounds keeps temperature 1")
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    ids = [chat_ids(tokenizer, text) for text in sample_prompts(args.set, args.prompts)]
    how = {"do_sample": False, "max_new_tokens": args.max_new_tokens}

    with optimize_for_cpu(model), optimize_for_cpu(drafter):
        record = SpeculationConfig(record_confidence=True)
        fit, held = (decode(model, drafter, part, how, record) for part in (ids[::2], ids[1::2]))
        logits, verified, accepted = columns(fit)
        temperatures = fit_sequential_temperatures(
            logits, accepted, verified_lengths=verified, min_rounds=args.min_rounds
        )
        logits, verified, accepted = columns(held)
        for name, by in (("raw", None), ("calibrated", temperatures)):
            rows = position_reliability(logits, accepted, verified_lengths=verified, temperatures=by)
            print(f"ECE of survival, {name}:", " ".join(f"{row.ece:.1%}" for row in rows))

        drafter.config.confidence_temperatures = [float(value) for value in temperatures]
        for threshold in (0.0, 0.3):
            stats = decode(model, drafter, ids[1::2], how, SpeculationConfig(survival_threshold=threshold))
            length, rate = stats.mean_acceptance_length, stats.draft_acceptance_rate
            print(
                f"survival threshold {threshold}: accepted length {length:.2f}, {rate:.0%} of verified drafts accepted"
            )
