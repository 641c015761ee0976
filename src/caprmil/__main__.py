"""`python -m caprmil` is the command line."""

from caprmil.cli import run

run()
