"""Metrics of predictions, computed batch by batch."""
