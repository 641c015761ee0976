"""Experiments: sweeps, the paper's benchmarks, and what models cost."""
