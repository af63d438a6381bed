"""Conversations: turns, the chat template, undo, and sessions on disk. Nothing here prints."""
