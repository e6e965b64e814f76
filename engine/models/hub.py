"""Models of the Hugging Face hub: a repository id becomes a local folder. Local paths never come here."""

from __future__ import annotations

import re
from pathlib import Path

from radixcast.protocols.errors import StartupError

_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]
"""Other formats of the same weights (original/, onnx/, gguf/)."""


def looks_like_hub_id(text: str) -> bool:
    """Whether `text` can be a repository id: two names and one slash."""
    return bool(_ID.match(text))


def fetch_from_hub(repo_id: str) -> Path:
    """Local folder with the repository's files, downloaded if need be.

    HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN are honoured by huggingface_hub; offline, a complete earlier
    download serves. Raises StartupError when there is none, or the repository does not exist or is closed to us.
    """
    # here, not above: it takes 0.3 s, and most models are local
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise StartupError(f"{repo_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"there is no model {repo_id} on the hub (or it is private: set HF_TOKEN)") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise StartupError(
            f"{repo_id} is not in the local hub cache and the hub can't be reached (offline, or HF_HUB_OFFLINE is set); "
            "give --model-path a local folder or .gguf file, or smollm2"
        ) from error
    except HfHubHTTPError as error:
        raise StartupError(f"the hub refused {repo_id}: {str(error).splitlines()[0][:300]}") from error
    except OSError as error:
        raise StartupError(f"can't download {repo_id}: {error}") from error
    except Exception as error:
        # the HTTP library below differs between versions of huggingface_hub, and so do its connection errors
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "httpx2", "httpcore2", "requests", "urllib3"):
            raise
        raise StartupError(f"can't reach the hub for {repo_id}: {error}") from error
