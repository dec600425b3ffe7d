"""The parts of ``python -m lightning_sync.train``."""
