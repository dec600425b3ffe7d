"""Hydra groups of ``python -m lightning_sync.train`` only (model, data, trainer, logger, experiment)."""
