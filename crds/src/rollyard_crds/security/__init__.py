"""What every package uses against hostile input and curious neighbours: text for logs, folders, tokens."""
