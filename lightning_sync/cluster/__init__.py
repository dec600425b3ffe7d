"""SLURM: whether a job is set up as it should be, and how it goes on after it was interrupted. Imports no Lightning."""

from lightning_sync.cluster.newest import newest_checkpoint as newest_checkpoint
from lightning_sync.cluster.preflight import preflight as preflight
