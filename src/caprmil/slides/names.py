"""Names of slides, and the file name endings by which slides and their bags are known."""

from pathlib import PurePosixPath

SLIDE_SUFFIXES = (
    *(".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".dcm", ".scn", ".bif", ".svslide", ".vms"),
    *(".png", ".jpg", ".jpeg"),
)
"""Endings of slide files."""

BAG_SUFFIXES = (".h5", ".hdf5", ".npz", ".npy", ".pt")
"""Endings of feature files."""


def slide_name(file: str) -> str:
    """Return the name of the slide: without the folders and endings of a file, if it is one."""
    path = PurePosixPath(file.replace("\\", "/"))
    return (
        slide_name(path.stem) if path.suffix.lower() in (*SLIDE_SUFFIXES, *BAG_SUFFIXES) else file
    )
