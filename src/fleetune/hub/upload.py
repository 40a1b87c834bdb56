"""Uploading a finished model to the Hugging Face hub, as whom the hub's own login says.

The token is read by huggingface_hub alone, from `hf auth login` or HF_TOKEN: nothing here sees it.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

from fleetune.errors import ConfigError
from fleetune.hub.card import CARD, is_ours

UPLOADED = (
    CARD, "config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.py", "eval_results.json", "train_results.json",
    "all_results.json",
)  # fmt: skip
"""Files of an output folder that are of the model: the record and the logs name hosts and folders."""


def check_login() -> None:
    """Refuse, before training, an upload that nobody is logged in for.

    Raises:
        ConfigError: There is no token; offline none is needed, as nothing is uploaded.
    """
    from huggingface_hub import constants, get_token

    if not constants.HF_HUB_OFFLINE and get_token() is None:
        raise ConfigError("--push_to_hub: nobody is logged in to the hub: say `hf auth login`, or set HF_TOKEN")


def upload(folder: Path, name: str, *, private: bool | None, message: str) -> str:
    """Upload a finished model with its card; a failure ends nothing.

    Args:
        folder: The output folder.
        name: Of the repository, with or without its owner; it is made where it is not there.
        private: Whether one that is made is private; None: as the hub has it by default.
        message: Of the commit.

    Returns:
        A line to tell: where it is, or why not and how to do it later.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    files = files_of(folder)
    if constants.HF_HUB_OFFLINE:
        return f"not uploaded, HF_HUB_OFFLINE is set: later, {by_hand(folder, name, files, private)}"
    try:
        with _quiet():
            return _upload(folder, name, files, private, message)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"not uploaded to {name}: {reason}; later, {by_hand(folder, name, files, private)}"
    except Exception as error:  # of the HTTP library, which the hub's does not map
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        return f"not uploaded to {name}: {error}; later, {by_hand(folder, name, files, private)}"


def _upload(folder: Path, name: str, files: list[str], private: bool | None, message: str) -> str:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    repository = api.create_repo(name, private=private, exist_ok=True).repo_id
    remark = ""
    if CARD in files and not _may_replace_card(api, repository):
        files = [file for file in files if file != CARD]
        remark = f"; the repository has a {CARD} that is not fleetune's, which was left as it is"
    operations = [CommitOperationAdd(path_in_repo=file, path_or_fileobj=folder / file) for file in files]
    api.create_commit(repository, operations=operations, commit_message=message)
    return f"uploaded {len(files)} files to {api.endpoint}/{repository}{remark}"


def _may_replace_card(api: object, repository: str) -> bool:
    """Whether the repository has no card, or one that fleetune wrote and nobody changed."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        text = Path(hf_hub_download(repository, CARD, force_download=True)).read_text(encoding="utf-8")
    except EntryNotFoundError:
        return True
    return is_ours(text)


def files_of(folder: Path) -> list[str]:
    """Names of the files that are uploaded."""
    found = {path.name for pattern in UPLOADED for path in folder.glob(pattern) if path.is_file()}
    return sorted(name for name in found if not name.startswith("."))


def by_hand(folder: Path, name: str, files: list[str], private: bool | None) -> str:
    """The command that uploads the same files."""
    includes = [word for file in files for word in ("--include", file)]
    return shlex.join(["hf", "upload", name, str(folder), ".", *includes, *(["--private"] if private else [])])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars, and no warnings: what matters is in the line that is told."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    was_disabled, logger = are_progress_bars_disabled(), logging.getLogger("huggingface_hub")
    level = logger.level
    disable_progress_bars()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if not was_disabled:
            enable_progress_bars()
