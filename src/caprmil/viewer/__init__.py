"""Viewer: a read-only page on this machine, to look at slides of a run and ask why."""

from caprmil.viewer.app import create
from caprmil.viewer.library import Library
from caprmil.viewer.serving import serve

__all__ = ["Library", "create", "serve"]
