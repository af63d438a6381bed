"""The commands: thin shells over options, session and ui. Importing them costs no torch."""
