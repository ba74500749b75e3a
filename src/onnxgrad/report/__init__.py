"""What a training records of itself, and the page that shows it."""
