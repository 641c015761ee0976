"""Features: bags of patch features, their file formats, and how they are made."""
