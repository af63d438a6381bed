"""What every room uses, and what uses none of them: files and folders, memory, processes, texts, progress."""
