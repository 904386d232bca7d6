"""Drafters: one block network (DSpark, DFlash) for every target family, and the checkpoint layouts that hold it."""
