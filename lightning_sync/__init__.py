"""Lightning strategies and precision plugins for every way of synchronising data-parallel training."""
