"""Crews: who does the units of a long work, this process or the workers of a Ray cluster."""

from caprmil.crew.cluster import OnRay
from caprmil.crew.notes import Note, read_notes
from caprmil.crew.units import Crew, Done, Failed, Here, Unit, Worker

__all__ = ["Crew", "Done", "Failed", "Here", "Note", "OnRay", "Unit", "Worker", "read_notes"]
