"""Features: bags of patch features, their file formats, extraction and conversion."""
