"""Downloads from the Hugging Face Hub, with one-line error messages.

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE as usual. It tries for half a minute to reach a
Hub that cannot be reached, for each file, and for minutes one that accepts a connection and says nothing; so that is
checked first.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

from h2o_stream.base.progress import Progress, ProgressCallback, ignore
from h2o_stream.config import DEFAULT_MODEL, HUB_ANSWER_S
from h2o_stream.errors import ModelNotFoundError


def download_bars(progress: ProgressCallback) -> type[Any]:
    """A ``tqdm_class`` for huggingface_hub and transformers that reports the sum of all bars to `progress`."""
    from tqdm import tqdm

    bars: dict[int, tuple[int, int]] = {}

    class Bar(tqdm):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **{**more, "file": io.StringIO(), "disable": False, "leave": False})

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B":
                bars[id(self)] = int(self.n), int(self.total or self.n)
                done, total = map(sum, zip(*bars.values(), strict=True))
                progress(Progress("downloading", done, total))

    return Bar


def reachable(repo: str) -> bool:
    """Whether the host of a repository answers, through the proxy if there is one. Nothing is reachable offline.

    HF_HUB_ETAG_TIMEOUT, if it is set, is how many seconds that may take.
    """
    from huggingface_hub import constants, get_session, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return False
    limit_s = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else HUB_ANSWER_S
    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(hf_hub_url(repo, "config.json"), timeout=limit_s)
        except Exception:  # noqa: BLE001  (of httpx or httpx2, by the version of huggingface_hub)
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit, nor has a slow trickle
    thread.start()
    thread.join(limit_s)
    return answered.is_set()


def fetch(repo: str, file: str, offline: bool, progress: ProgressCallback = ignore) -> Path:
    """Download one file of a model repository, or find it in the local cache.

    Raises:
        ModelNotFoundError: not found, gated, offline or unreachable; the message says what to do.
    """
    from huggingface_hub import constants, errors, hf_hub_download
    from huggingface_hub.utils import validate_repo_id

    offline = offline or constants.HF_HUB_OFFLINE
    try:
        validate_repo_id(repo)
        local = offline or not reachable(repo)
        return Path(hf_hub_download(repo, file, local_files_only=local, tqdm_class=download_bars(progress)))
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo} and set HF_TOKEN "
            f"(huggingface.co/settings/tokens), or use an ungated model such as {DEFAULT_MODEL}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {repo} on the Hub, or it is private; check the name, or set HF_TOKEN if it is yours"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = (
            f"is not in the local cache ({constants.HF_HUB_CACHE}) and this run is offline; "
            "go online once, without --offline and HF_HUB_OFFLINE"
            if offline
            else f"is not in the local cache and {constants.ENDPOINT} cannot be reached; check the network "
            "(HF_HUB_ETAG_TIMEOUT=30 waits longer for a slow one)"
        )
        raise ModelNotFoundError(f"{repo} {why}, or use a local folder or {DEFAULT_MODEL}") from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{repo} has no file {file}: it is not a model in transformers' format") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(
            f"{repo!r} is neither a file, nor a folder, nor a Hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelNotFoundError(f"{repo} could not be fetched: {str(error).splitlines()[0]}") from error
