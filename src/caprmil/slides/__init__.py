"""Slides: open them, find tissue, lay out patches, check quality. No torch."""
