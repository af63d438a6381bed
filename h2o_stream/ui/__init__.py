"""The only part that draws: terminal, live screen, plain output, tables and the chat prompt."""
