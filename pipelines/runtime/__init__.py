"""What every stage builds on: its folder and digest, Ray, distributing work, progress."""
