"""Checkpoint layouts: one file a family, each detects, reads and writes strictly."""
