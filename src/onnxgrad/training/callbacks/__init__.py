"""Callbacks of `Trainer`: what watches training, reports it, and stops it."""
