"""Evaluation: predictions, metrics, calibration, baselines and comparisons of models."""
