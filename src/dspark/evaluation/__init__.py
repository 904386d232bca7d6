"""What a drafter is worth: figures over task sets with their uncertainty, side by side, as a page to read."""
