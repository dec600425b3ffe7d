"""Models and data to try the strategies on, without any download. They know nothing of the rest of this package."""
