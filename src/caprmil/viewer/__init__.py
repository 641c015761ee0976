"""Viewer: a read-only page on this machine with the slides of a run and their explanations."""

from caprmil.viewer.app import create
from caprmil.viewer.library import Library
from caprmil.viewer.server import serve

__all__ = ["Library", "create", "serve"]
