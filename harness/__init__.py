"""Experiments: each measures a claim on real parts and writes an artifact. ``python -m harness.NAME``."""
