"""Crews: who does the units of a long work, this process or the workers of a Ray cluster."""

from caprmil.executors.base import Crew, Done, Failed, Here, Unit, Worker
from caprmil.executors.job_status import Note, read_notes
from caprmil.executors.ray import OnRay

__all__ = ["Crew", "Done", "Failed", "Here", "Note", "OnRay", "Unit", "Worker", "read_notes"]
