"""Which constants of a model train by default, and why."""
