"""Callbacks of `Trainer`, which watch training, report it, and stop it."""
