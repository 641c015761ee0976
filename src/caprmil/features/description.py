"""What the features of a cohort are, in a sentence: encoder, width and scale."""

GENERATED = "synthetic"
"""The encoder that generated bags name: their features are random numbers, not of slides."""


def describe_features(
    encoder: str | None, width: int, mpp: float | None, patch_px: int | None = None
) -> str:
    """Return the encoder, width and scale of features. Generated ones are called that."""
    if encoder == GENERATED:
        return f"Features: generated, not of slides; {width:,} wide."
    name = encoder or "of an encoder that the bags do not name"
    scale = f"{mpp:g} um/px" if mpp else "a scale that the bags do not name"
    patches = f"patches of {patch_px} px" if patch_px else "patches"
    return f"Features: {name}, {width:,} wide, {patches} at {scale}."
