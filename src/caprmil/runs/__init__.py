"""Runs: the folder of a training, its models, and their use on new slides."""
