"""A model folder as a repository on a Hugging Face hub; the token comes from the environment alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import RlhfError, first_line, named_line

TOKEN_VARIABLE = "HF_TOKEN"


@dataclass(frozen=True)
class Upload:
    """``repository`` is ``owner/name``. ``public`` counts where the repository has to be made."""

    repository: str
    public: bool
    message: str


def check_repository(repository: str) -> None:
    """Check the name of the repository and that there is a token, before any work is done.

    Raises:
        RlhfError: The name is no ``owner/name``, or the environment has no token.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise RlhfError(f"--push {repository}: {first_line(error)}") from error
    if repository.count("/") != 1:
        raise RlhfError(f"--push {repository}: write it as owner/name")
    if get_token() is None:
        raise RlhfError(f"--push needs a token that may write to {repository}: set {TOKEN_VARIABLE}")


def upload(folder: Path, what: Upload) -> str:
    """Upload ``folder`` in one commit, to a repository that is made if there is none.

    Returns:
        The address of the repository.

    Raises:
        RlhfError: The hub refuses or does not answer; the folder stays, so that it can be pushed again.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(what.repository, private=not what.public, exist_ok=True)
        api.upload_folder(repo_id=what.repository, folder_path=folder, commit_message=what.message)
    except Exception as error:  # the client's own errors and those of its HTTP library, which depends on its version
        raise RlhfError(
            f"{folder} is written, but could not be pushed to {what.repository} ({named_line(error)})"
        ) from error
    return str(address)
