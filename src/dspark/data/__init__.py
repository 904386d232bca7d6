"""Conversations: read them from JSON lines, render them through a chat template, and mark what is supervised."""
