"""The target cache: tokens and target features of training rows, written once and memory-mapped by the trainer."""
