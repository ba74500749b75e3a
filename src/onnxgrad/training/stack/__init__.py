"""Many copies of one model, trained in one graph."""
