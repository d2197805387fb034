"""Protection against hostile input and curious neighbours: text for logs, private folders, tokens."""
