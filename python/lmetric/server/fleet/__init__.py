"""Models, their engines, and what the router knows of each."""
