"""Figures one can believe, measured through the engine."""
