"""These tests need timm and transformers, which are in a separate environment."""

from importlib.util import find_spec

if find_spec("timm") is None or find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
