"""Names on the Hugging Face hub: turns the id of a model, adapter or dataset into files on this machine.

`run/builders` fetches models, adapters and reward models here, `tasks/files.py` asks for the commit of a dataset. All
traffic goes through huggingface_hub, with its cache (HF_HOME), its offline switch (HF_HUB_OFFLINE) and its tokens.

Guarantees: a folder of that name always wins; only safetensors weights are downloaded, no pickles and no code; what
cannot be fetched is one error that names the id and the remedy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sortedrl.errors import HubError, ModelError, first_line

# The files that from_pretrained reads. Weights in other formats stay on the hub.
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_WEIGHT_FILES = ("model.safetensors", "model-*-of-*.safetensors", "adapter_model.safetensors")
_SUBFOLDERS = ("*/*",)  # copies for other programs, and earlier checkpoints
_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

Commits = dict[str, str]
"""The commit of each repository that a run uses, by the configuration key that names it."""


def is_repo_id(name: str) -> bool:
    """Whether a name can be that of a repository: `owner/name` or `name`, and nothing on this machine."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def split_revision(name: str) -> tuple[str, str]:
    """Split `owner/name@revision`. A folder whose name contains the sign stays whole."""
    if Path(name).exists():
        return name, ""
    repo, _, revision = name.partition("@")
    return repo, revision


def is_commit(name: str) -> bool:
    return _COMMIT.fullmatch(name) is not None


def commit_of(folder: Path) -> str:
    """The commit of a folder in the hub's cache; empty for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and is_commit(folder.name) else ""


def shown(folder: str | Path) -> str:
    """How messages name a folder: one in the hub's cache by its id."""
    path = Path(folder)
    return path.parents[1].name.removeprefix("models--").replace("--", "/") if commit_of(path) else str(folder)


def fetch(
    name: str,
    *,
    key: str,
    revision: str = "",
    commits: Commits | None = None,
    label: str = "",
    has_weights: bool = True,
) -> Path:
    """The folder of a model or adapter: that of this name, or a snapshot of the repository, downloaded if it is new.

    A commit in `commits` replaces the revision; otherwise the commit that was fetched is noted there. Messages use
    `label`, or the key. With `has_weights` false, as for a tokenizer, weights are not downloaded.
    """
    label = label or key
    if not is_repo_id(name):
        if revision:
            raise ModelError(
                f"{label} {name!r} is not on the hub, so it has no revision {revision!r}: remove the revision"
            )
        return Path(name)
    wanted = (commits or {}).get(key) or revision
    try:
        folder = _download(name, wanted, has_weights=has_weights)
    except Exception as error:  # the hub's library and what it stands on raise errors of many kinds
        raise ModelError(explain(error, name, key=label, revision=wanted)) from error
    if commits is not None:
        commits[key] = commit_of(folder)
    return folder


def find_cached(name: str, revision: str = "") -> Path | None:
    """The folder of this name, or the repository's snapshot in the cache; None if neither is here."""
    if not is_repo_id(name):
        return Path(name) if Path(name).is_dir() else None
    try:
        return _download(name, revision, local_files_only=True)
    except Exception:  # not in the cache, or only a part of it
        return None


def dataset_commit(name: str, *, revision: str = "") -> str:
    """The commit of a dataset on the hub. Raises what huggingface_hub raises, at once: it does not retry."""
    from huggingface_hub import HfApi

    return HfApi().dataset_info(name, revision=revision or None).sha or ""


def upload(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> Any:
    """Upload a folder to a model repository, which is created if it is new; returns huggingface_hub's CommitInfo."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        with _bars_on_terminals_only():
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            return api.upload_folder(
                repo_id=repo.repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
            )
    except Exception as error:  # the hub's library and what it stands on raise errors of many kinds
        raise HubError(_explain_upload(error, repo_id)) from error


def is_unreachable(error: BaseException) -> bool:
    """Whether a request failed without an answer of the hub, so that a cache may still serve it."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _download(name: str, revision: str, *, has_weights: bool = True, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    with _bars_on_terminals_only():
        folder: Any = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=[*_TEXT_FILES, *(_WEIGHT_FILES if has_weights else ())],
            ignore_patterns=list(_SUBFOLDERS),
            local_files_only=local_files_only,
        )
    return Path(folder)


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    is_hidden = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if is_hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_hidden:
            enable_progress_bars()


# ---- messages --------------------------------------------------------------------------------------------------------


def explain(error: BaseException, name: str, *, key: str, revision: str = "", kind: str = "model") -> str:
    """Say in one line why a repository could not be fetched, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    is_dataset = kind == "dataset"
    page = f"{constants.ENDPOINT}/{'datasets/' if is_dataset else ''}{name}"
    command = f"hf download {'--repo-type dataset ' if is_dataset else ''}{name}"
    subject = f"{key} {name!r}"
    what = "is no file or folder" if is_dataset else "is not a folder"
    match error:
        case GatedRepoError():
            return f"{subject} is gated: accept its terms at {page}, then run hf auth login or set HF_TOKEN"
        case RevisionNotFoundError():
            return f"{subject} has no revision {revision!r} on the hub: name a branch, a tag or a commit"
        case RepositoryNotFoundError():
            return (
                f"{subject} {what}, and the hub shows you no {kind} of that name: correct the name; for a private one "
                f"run hf auth login or set HF_TOKEN, then {command}"
            )
        case _ if is_offline():
            return (
                f"{subject} {what}, it is not in the cache of the hub, and HF_HUB_OFFLINE is set: unset it, or run "
                f"{command} where there is a connection and copy HF_HOME, or give a folder"
            )
        case _:
            return (
                f"{subject} {what}, it is not in the cache of the hub, and it could not be fetched from "
                f"{constants.ENDPOINT} ({_cause(error)}): check the connection, or run {command} where there is one "
                "and copy HF_HOME, or give a folder"
            )


def _explain_upload(error: BaseException, repo_id: str) -> str:
    from huggingface_hub import constants

    response = getattr(error, "response", None)
    if response is not None and response.status_code in (401, 403):
        return f"the hub does not let you write {repo_id!r}: run hf auth login with a token that may, or set HF_TOKEN"
    if is_offline():
        return f"{repo_id!r} cannot be uploaded while HF_HUB_OFFLINE is set: unset it"
    return f"{repo_id!r} could not be uploaded to {constants.ENDPOINT} ({_cause(error)}): check the connection"


def _cause(error: BaseException) -> str:
    return first_line(error.__cause__ or error)[:160]
