"""Gradients against central differences."""
