"""Names of slides, and the file suffixes of slides and bags."""

from pathlib import PurePosixPath

SLIDE_SUFFIXES = (
    *(".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".dcm", ".scn", ".bif", ".svslide", ".vms"),
    *(".png", ".jpg", ".jpeg", ".bmp"),
)
"""Suffixes of slide files."""

BAG_SUFFIXES = (".h5", ".hdf5", ".npz", ".npy", ".pt")
"""Suffixes of feature files."""


def slide_name(file: str) -> str:
    """Return the name of a slide: a file name without its folders and known suffixes."""
    path = PurePosixPath(file.replace("\\", "/"))
    return (
        slide_name(path.stem) if path.suffix.lower() in (*SLIDE_SUFFIXES, *BAG_SUFFIXES) else file
    )
