"""Everything that is shown: terminal, live screen, plain output, tables, reports and the chat prompt."""
