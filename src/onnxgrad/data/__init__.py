"""Data that users pass: arrays, tables, and checks against what a model declares."""
