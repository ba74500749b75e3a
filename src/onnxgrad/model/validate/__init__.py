"""Checks of a model that comes in."""
