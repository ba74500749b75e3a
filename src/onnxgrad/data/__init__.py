"""What users pass as data."""
