"""Downloads from the Hugging Face Hub, with one-line error messages.

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE as usual. It tries for half a minute to reach a
Hub that cannot be reached, for each file; so that is checked first.
"""

from __future__ import annotations

import io
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from h2o_stream.config import DEFAULT_MODEL, HUB_CONNECT_S
from h2o_stream.errors import ModelNotFoundError
from h2o_stream.progress import Progress, ProgressCallback, ignore


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
    """Whether the host of a repository, or the proxy for it, accepts a connection. Nothing is reachable offline.

    HF_HUB_ETAG_TIMEOUT, if it is set, is how many seconds that may take.
    """
    from huggingface_hub import constants, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return False
    url = urlsplit(hf_hub_url(repo, "config.json"))
    proxies = {} if proxy_bypass(url.hostname or "") else getproxies()
    if proxy := proxies.get(url.scheme) or proxies.get("all"):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    limit_s = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else HUB_CONNECT_S
    connected = threading.Event()

    def connect() -> None:
        try:
            port = url.port or {"https": 443, "socks5": 1080, "socks5h": 1080}.get(url.scheme, 80)
            socket.create_connection((url.hostname or "", port), limit_s).close()
            connected.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)  # looking up a name has no time limit
    thread.start()
    thread.join(limit_s)
    return connected.is_set()


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
