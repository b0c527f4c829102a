"""Decisions about checkpoints: is one complete, is it fresh, when is the next one due."""
