"""Slow and obviously right: what the fast code is held to. Never imported by `src`; imports nothing of it."""
