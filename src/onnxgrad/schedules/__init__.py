"""Learning rates of the steps of a training."""
