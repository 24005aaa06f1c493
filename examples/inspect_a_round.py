"""One round by hand: what the drafter proposes behind a text, and what the target says to it.

    python examples/inspect_a_round.py "The capital of France is"

`drafter.draft` is the stateless door: hidden states of the target in, one block out. A draft is accepted while it is
the target's own arg-max; the first one that is not is replaced by the target's token.
"""

import torch
from models import load, parser

if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("text", nargs="?", default="The first ten numbers are 1, 2, 3, 4,")
    args = options.parse_args()
    model, tokenizer, drafter = load(args)
    ids = tokenizer(args.text, return_tensors="pt").input_ids

    with torch.no_grad():
        # Layer l is the output of decoder layer l, which transformers lists at l + 1; -1 is the embedding's output.
        passed = model(ids, output_hidden_states=True)
        states = torch.cat([passed.hidden_states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
        anchor = passed.logits[:, -1].argmax(-1)  # the newest token: the target has not run over it yet
        block = drafter.draft(anchor, states, target=model)
        whole = torch.cat([ids, anchor[:, None], block.token_ids], dim=1)
        wanted = model(whole).logits[0, ids.shape[1] :].argmax(-1)  # the target's own token after anchor and drafts

    drafts = block.token_ids[0].tolist()
    agrees = [draft == want for draft, want in zip(drafts, wanted.tolist(), strict=False)]
    accepted = agrees.index(False) if False in agrees else len(agrees)
    confidence = (
        [None] * len(drafts) if block.confidence_logits is None else block.confidence_logits[0].sigmoid().tolist()
    )
    print(f"anchor {tokenizer.decode(anchor)!r} after {args.text!r}")
    print(f"{'slot':4}  {'draft':14}  {'confidence':10}  {'alone':14}  target")
    for slot, (draft, sure) in enumerate(zip(drafts, confidence, strict=True)):
        # What the parallel pass would have said in this slot, without the sequential head's repair.
        alone = int(drafter.to_target_ids(block.base_logits[0, slot].argmax(-1)))
        words = [repr(tokenizer.decode([token])) for token in (draft, alone, int(wanted[slot]))]
        mark = "accepted" if slot < accepted else "refused" if slot == accepted else "not reached"
        known = "" if sure is None else f"{sure:.2f}"
        print(f"{slot + 1:<4}  {words[0]:14}  {known:10}  {words[1]:14}  {words[2]}  {mark}")
    print(f"the round adds {accepted + 1} tokens: {tokenizer.decode([*drafts[:accepted], int(wanted[accepted])])!r}")
