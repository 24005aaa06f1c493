"""`report.md` and plots of the study, from its result files alone."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.calibration import fit_sequential_temperatures, position_reliability

BASE = "{}-3layers-block7"


def write_report(folder: Path) -> None:
    """Read `<variant>.json` files and write the page; what is not measured yet is said to be missing."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*layers-block*.json"))}
    if not results:
        return
    lines = ["# The paper in small", "", *_lengths(results), *_claims(results), *_calibration(results)]
    lines += _sweep(results)
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    _plots(results, folder)


def mean_length(result: dict) -> float:
    """Accepted length over all sets, each set counting once."""
    lengths = [one["accepted_length"] for one in result["sets"].values()]
    return sum(lengths) / len(lengths)


def _lengths(results: dict) -> list[str]:
    sets = list(next(iter(results.values()))["sets"])
    lines = [f"| variant | parameters | {' | '.join(sets)} | mean |", "|" + "---|" * (len(sets) + 3)]
    for name, result in results.items():
        cells = [f"{result['sets'][s]['accepted_length']:.2f}" for s in sets]
        row = f"| {name} | {result['parameters'] / 1e6:.1f} M | {' | '.join(cells)} | {mean_length(result):.3f} |"
        lines.append(row)
    return ["## Accepted length (bonus token included), greedy, held-out prompts", "", *lines, ""]


def _claims(results: dict) -> list[str]:
    lines = ["## Claims", ""]

    def judge(claim: str, needed: list[str], holds) -> None:
        missing = [name for name in needed if name not in results]
        verdict, detail = ("not measured", f"needs {', '.join(missing)}") if missing else holds()
        lines.append(f"- **{verdict}**: {claim} ({detail})")

    vanilla, none = BASE.format("vanilla"), BASE.format("none")

    def every_domain():
        gaps = {
            s: results[vanilla]["sets"][s]["accepted_length"] - results[none]["sets"][s]["accepted_length"]
            for s in results[vanilla]["sets"]
        }
        shown = ", ".join(f"{s} {gap:+.2f}" for s, gap in gaps.items())
        return ("holds" if min(gaps.values()) > 0 else "does not hold"), shown

    judge("the sequential head raises the accepted length on every domain", [vanilla, none], every_domain)

    def later_positions():
        ours, theirs = (_conditional(results[name]) for name in (vanilla, none))
        gaps = [a - b for a, b in zip(ours[1:], theirs[1:], strict=False)]
        if not gaps:
            return "not measured", "too few rounds"
        return ("holds" if min(gaps) > 0 else "does not hold"), "positions 2...: " + " ".join(
            f"{g:+.2f}" for g in gaps
        )

    judge("it raises conditional acceptance behind the first position (Fig. 2)", [vanilla, none], later_positions)

    blocks = [(f"vanilla-3layers-block{b}", f"none-3layers-block{b}") for b in (4, 7, 16)]

    def growing():
        gaps = [mean_length(results[a]) - mean_length(results[b]) for a, b in blocks]
        shown = ", ".join(f"block {b}: {gap:+.3f}" for b, gap in zip((4, 7, 16), gaps, strict=True))
        return ("holds" if gaps == sorted(gaps) else "does not hold"), shown

    judge("the gap grows with the block", [name for pair in blocks for name in pair], growing)

    def shallow():
        two, five = mean_length(results["vanilla-2layers-block7"]), mean_length(results["none-5layers-block7"])
        return ("holds" if two > five else "does not hold"), f"{two:.3f} against {five:.3f}"

    judge("two layers with the head beat five without", ["vanilla-2layers-block7", "none-5layers-block7"], shallow)

    def richer():
        lengths = {head: mean_length(results[BASE.format(head)]) for head in ("vanilla", "gated", "rnn")}
        best = max(lengths, key=lambda head: lengths[head])
        shown = ", ".join(f"{head} {length:.3f}" for head, length in lengths.items())
        return ("holds" if best != "vanilla" else "does not hold"), shown

    judge(
        "gated or recurrent heads beat the Markov head", [BASE.format(h) for h in ("vanilla", "gated", "rnn")], richer
    )
    return [*lines, ""]


def _conditional(result: dict) -> list[float]:
    """Per position over all sets, weighted by rounds."""
    verified = [v for one in result["sets"].values() for v in one["verified"]]
    accepted = [a for one in result["sets"].values() for a in one["accepted"]]
    rates = []
    for k in range(max(verified)):
        reached = [a for v, a in zip(verified, accepted, strict=True) if v > k and a >= k]
        if len(reached) < 20:
            break
        rates.append(sum(a > k for a in reached) / len(reached))
    return rates


def _calibration(results: dict) -> list[str]:
    result = results.get(BASE.format("vanilla"))
    if result is None:
        return []
    # Odd rounds fit, even rounds judge: no round does both.
    rounds = [r for one in result["sets"].values() for r in one["rounds"]]
    fit, held = rounds[1::2], rounds[::2]
    if min(len(fit), len(held)) < 50:
        return []
    logits, verified, accepted = zip(*fit, strict=True)
    temperatures = fit_sequential_temperatures(logits, accepted, verified_lengths=verified)
    logits, verified, accepted = zip(*held, strict=True)
    lines = ["| position | rounds | ECE before | ECE after | AUC | temperature |", "|---|---|---|---|---|---|"]
    for before, after, t in zip(
        position_reliability(logits, accepted, verified_lengths=verified),
        position_reliability(logits, accepted, verified_lengths=verified, temperatures=temperatures),
        temperatures.tolist(), strict=True,
    ):  # fmt: skip
        cells = (f"{before.position + 1}", f"{before.num_rounds}", f"{before.ece:.1%}", f"{after.ece:.1%}")
        lines.append(f"| {' | '.join(cells)} | {after.auc:.2f} | {t:.2f} |")
    return ["## Calibration of survival (Fig. 6; half of the rounds fit, the others judge)", "", *lines, ""]


def _sweep(results: dict) -> list[str]:
    sweep = results.get(BASE.format("vanilla"), {}).get("sweep")
    if not sweep:
        return []
    lines = ["| threshold | acceptance rate | verified per round | accepted length |", "|---|---|---|---|"]
    for row in sweep:
        lines.append(
            f"| {row['threshold']} | {row['acceptance_rate']:.1%} | {row['verified_per_round']:.2f} | "
            f"{row['accepted_length']:.2f} |"
        )
    return ["## Confidence threshold (Fig. 5)", "", *lines, ""]


def _plots(results: dict, folder: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for (head, style), shade in zip(
        {"none": ":", "vanilla": "-", "gated": "--", "rnn": "-."}.items(), ("0.5", "0.0", "0.3", "0.6"), strict=True
    ):
        if (result := results.get(BASE.format(head))) is not None:
            rates = _conditional(result)
            left.plot(range(1, len(rates) + 1), rates, style, color=shade, marker="o", label=head)
        depths = [(d, r) for d in (1, 2, 3, 5) if (r := results.get(f"{head}-{d}layers-block7")) is not None]
        if len(depths) > 1:
            right.plot([d for d, _ in depths], [mean_length(r) for _, r in depths], style, color=shade, marker="s",
                       label=head)  # fmt: skip
    left.set(xlabel="draft position", ylabel="conditional acceptance")
    right.set(xlabel="draft layers", ylabel="accepted length")
    for panel in (left, right):
        if panel.lines:
            panel.legend(frameon=False)
    figure.savefig(folder / "figures.png", dpi=130)
