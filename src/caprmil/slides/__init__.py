"""Slides: reading, tissue detection, patch grid, quality control. Loads without torch."""
