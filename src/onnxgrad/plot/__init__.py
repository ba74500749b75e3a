"""Models and losses to look at."""
