"""Running training graphs."""
