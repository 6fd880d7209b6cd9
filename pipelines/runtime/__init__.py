"""The base of every stage: its folder and digest, Ray, distributing work, progress."""
