"""Experiments: sweeps, the paper's benchmarks, the cost of models, and the status of a folder."""
