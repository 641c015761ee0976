"""Cohorts: slides, patients and labels with their bags, and their folds."""
