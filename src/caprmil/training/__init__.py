"""Training: a recipe and a cohort become a run."""
