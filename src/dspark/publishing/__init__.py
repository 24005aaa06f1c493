"""Drafters as repositories on the Hub: what goes there, what must not, and sending it."""

from .contents import Plan, RepositoryFile, code_files, plan_push, write_code
from .drafter import push_drafter, push_saved
from .upload import push_folder

__all__ = [
    "Plan",
    "RepositoryFile",
    "code_files",
    "plan_push",
    "push_drafter",
    "push_folder",
    "push_saved",
    "write_code",
]
