"""Inference of the shapes and types of a graph."""
