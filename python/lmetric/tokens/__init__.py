"""Tokenizes prompts like the engines, with chat templates, and converts answers back to text."""
