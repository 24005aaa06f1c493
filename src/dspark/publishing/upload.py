"""Sending a drafter to the Hub, in one commit through huggingface_hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RevisionNotFoundError

from .contents import WEIGHTS, Plan, plan_push


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    curve: str | Path | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    **commit: Any,
) -> CommitInfo:
    """Push a drafter's folder to the Hub.

    Weights of an earlier push that are not among the new ones are deleted in the same commit: loading would prefer
    them.

    Args:
        folder: As `save_pretrained` or `dspark train` wrote it, with a card (`dspark card`).
        repo_id: `owner/name`; made if missing.
        curve: A step curve of `dspark profile`, to go along as `curve.json`.
        private: Of a repository that is made now; None: as the account has it.
        token: As in huggingface_hub; None: the one it finds.
        revision: Branch; made if missing.
        **commit: As `HfApi.create_commit` takes them: `commit_message`, `commit_description`, `create_pr`.

    Raises:
        ValueError: Something must not be pushed; all of it is named, and nothing was sent.
    """
    plan = plan_push(folder, repo_id, curve=curve)
    if plan.refusals:
        raise ValueError(refused(folder, plan))
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not commit.get("create_pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    new = {file.path for file in plan.files}
    stale = [path for path in _in_repository(api, repo_id, revision) if WEIGHTS.fullmatch(path) and path not in new]
    operations: list[Any] = [
        CommitOperationAdd(file.path, file.content if isinstance(file.content, bytes) else str(file.content))
        for file in plan.files
    ]
    operations += [CommitOperationDelete(path) for path in stale]
    commit = {"commit_message": "Upload DSpark drafter", **commit}
    return api.create_commit(repo_id, operations, revision=revision, **commit)


def refused(folder: str | Path, plan: Plan) -> str:
    """All refusals of a plan as one message."""
    listed = "\n".join(f"- {reason}" for reason in plan.refusals)
    return f"{Path(folder).name} is not pushed, and nothing was sent:\n{listed}"


def _in_repository(api: HfApi, repo_id: str, revision: str | None) -> list[str]:
    try:
        return api.list_repo_files(repo_id, revision=revision)
    except RevisionNotFoundError:  # a pull request onto a branch that is not there yet
        return []


__all__ = ["push_folder", "refused"]
