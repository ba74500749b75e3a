"""What trains by default, and why."""
