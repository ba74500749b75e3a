"""Shapes and types of a graph."""
