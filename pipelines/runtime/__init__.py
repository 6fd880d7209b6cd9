"""What every stage stands on: its folder and digest, Ray, spreading work, progress."""
