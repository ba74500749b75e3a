"""Structural checks of an input model."""
