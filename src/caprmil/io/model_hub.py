"""The Hugging Face hub: named files of a repository are downloaded, a folder is uploaded.

Tokens are those of `hf auth login` or HF_TOKEN, or passed by the caller. They are never written.
"""

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caprmil.errors import RunError, one_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of a model
LARGEST = 2**34  # bytes of a run or a model that are downloaded
REPLACED = "<!-- caprmil replaces this card when it pushes again. Delete this line to keep it. -->"


def split_revision(repository: str) -> tuple[str, str | None]:
    """Return the name of a repository and the revision after its `@`, if there is one."""
    name, _, revision = repository.partition("@")
    return name, revision or None


def download(
    repository: str,
    files: Sequence[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Path:
    """Return a folder with these files of a repository, from the cache if they are in it.

    `repository` may end in @REVISION: a branch, a tag or a commit. `files` may be patterns. Names
    and declared sizes are checked before anything is downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, own = split_revision(repository)
    revision = revision or own
    options: dict[str, Any] = {"revision": revision, "token": token}
    try:
        try:
            names = _check_files(name, files, **options)
        except (RunError, MemoryError, HFValidationError, RevisionNotFoundError):
            raise
        except Exception as problem:  # the hub cannot be reached, or answers nonsense
            with suppress(Exception):
                cached: dict[str, Any] = {"allow_patterns": [*files], "local_files_only": True}
                return Path(snapshot_download(name, **cached, **options))
            raise problem from None
        return Path(snapshot_download(name, allow_patterns=[*map(escape, names)], **options))
    except (RunError, MemoryError):
        raise
    except HFValidationError:
        raise RunError(
            f"{repository} is neither a folder nor the name of a repository on the hub."
        ) from None
    except RevisionNotFoundError:
        raise RunError(f"{name} on the hub has no revision {revision}.") from None
    except GatedRepoError:
        raise RunError(
            f"You have no access to {name} on the hub. Request it on its page, and log in with: hf "
            "auth login"
        ) from None
    except RepositoryNotFoundError:
        raise RunError(
            f"There is no folder {name}, and no such repository on the hub, or it is private. Log "
            "in with: hf auth login"
        ) from None
    except Exception as problem:  # the exceptions depend on its HTTP library, and on the answer
        raise RunError(
            f"There is no folder {name}, and {_reason(problem)}. If it is on the hub, copy its "
            "folder here and pass the path."
        ) from problem


def _check_files(
    name: str, patterns: Sequence[str], *, revision: str | None, token: str | bool | None
) -> list[str]:
    """Return the files of a repository that match patterns, if they can be downloaded."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    info = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    if not re.fullmatch("[0-9a-f]{40}", info.sha or ""):
        raise ValueError("the hub does not say which commit it is")
    chosen = {
        each.rfilename: each.size or 0
        for each in info.siblings or ()
        if any(fnmatch(each.rfilename, pattern) for pattern in patterns)
    }
    for file in chosen:
        if "\\" in file or "\0" in file or {"", ".", ".."} & {*file.split("/")}:
            raise RunError(f"{name} on the hub has a file outside of its folder: {one_line(file)}")
    new = [f for f in chosen if try_to_load_from_cache(name, f, revision=info.sha) is None]
    size, cache = sum(chosen[file] for file in new), Path(constants.HF_HUB_CACHE).absolute()
    folder = next(each for each in (cache, *cache.parents) if each.exists())
    if size > min(LARGEST, shutil.disk_usage(folder).free):
        raise RunError(
            f"{name} on the hub has {size / 1e9:,.1f} GB to download: more than the free space of "
            f"{folder}, or than the {LARGEST / 1e9:.0f} GB that a run or a model may have."
        )
    return list(chosen)


def _reason(problem: Exception) -> str:
    """Return why the hub did not give a file, in a few words: its library explains at length."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if isinstance(problem, LocalEntryNotFoundError):
        return "the hub cannot be reached"
    status = getattr(getattr(problem, "response", None), "status_code", None)
    return f"the hub answers {status}" if status else f"the hub fails ({one_line(problem)})"


def upload(
    folder: Path,
    repository: str,
    *,
    private: bool = True,
    token: str | bool | None = None,
    branch: str | None = None,
    message: str = "Upload by caprmil",
) -> str:
    """Upload the files in a folder as one commit, and return its URL.

    A repository that does not exist is created. A card that somebody has edited is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    name, own = split_revision(repository)
    branch = branch or own
    api = HfApi(token=token)
    try:
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(name, branch=branch, exist_ok=True)
        kept = [CARD] if _is_edited(api, name, branch) else []
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message=message,
            revision=branch,
            ignore_patterns=kept,
        )
    except HFValidationError as problem:
        raise RunError(
            f"{repository} cannot be the name of a repository: {one_line(problem, 200)} Pass "
            "OWNER/NAME."
        ) from None
    except LocalTokenNotFoundError:
        raise RunError("The hub needs a token. Log in with: hf auth login") from None
    except HfHubHTTPError as problem:
        status = getattr(problem.response, "status_code", None)
        advice = (
            "Log in with a token that may write there: hf auth login"
            if status in (401, 403, 404)
            else "Try again later."
        )
        raise RunError(
            f"{name} cannot be written on the hub: {one_line(problem, 300)} {advice}"
        ) from problem
    except MemoryError:
        raise
    except Exception as problem:  # the exceptions depend on its HTTP library
        raise RunError(
            f"{name} cannot be written on the hub: {_sentence(problem)} Try again later."
        ) from problem
    return str(done.commit_url)


def _is_edited(api: "HfApi", name: str, branch: str | None) -> bool:
    """Return whether a repository has a card that caprmil must not replace."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        card = Path(api.hf_hub_download(name, CARD, revision=branch))
    except LocalEntryNotFoundError:  # the hub did not answer
        raise
    except EntryNotFoundError:
        return False
    return REPLACED not in card.read_text(encoding="utf-8", errors="replace")


def _sentence(problem: Exception) -> str:
    """Return the message of an error as a sentence."""
    return f"{(one_line(problem, 300) or type(problem).__name__).rstrip('.')}."
