"""Properties of the whole loop, whatever the drafter: the law of sampled text, penalties over long texts, no crash."""
