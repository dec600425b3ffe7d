"""Hydra groups of the library (strategy, compressor, aggregator, precision), installed as lightning_sync.conf."""
