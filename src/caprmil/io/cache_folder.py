"""The folder for what can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "caprmil"
