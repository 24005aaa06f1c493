"""One decoding round, one file per step; `loop.py` reads as the algorithm.

| step | takes | gives |
|---|---|---|
| 1 context | target hidden states of committed tokens | keys and values in the draft cache |
| 2 draft | anchor, context | hidden states and base logits of a block |
| 3 propose | base logits, anchor | tokens and the exact law of each draw |
| 4 confidence | hidden states, previous tokens | own confidence, survival |
| 5 schedule | survival, settings | drafts to verify per row |
| 6 verify | anchor and scheduled drafts | accepted drafts and the target's own next token |
| 7 commit | verdict | text, stop rules, both caches cut back |

Glossary: *target*, the model whose law is preserved; *drafter*, the DSpark model; *anchor*, the last committed token,
whose keys the target has not computed yet; *block*, the anchor and its masks; *bonus token*, the target's token after
all scheduled drafts were accepted; *recovered token*, its token after a rejection; *accepted length*, accepted drafts
plus that token, whose mean over rounds is tau; *survival*, the running product of confidences.
"""
